"""The arithmetic of `benchmarks.flat`, and the window of a load: it begins and ends with a whole wave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks import flat, load
from benchmarks.samples import LoadSpec


def of(cpu: float, foreign: float = 0.0) -> dict[str, Any]:
    return {
        "server_cpu_s_per_1000": cpu,
        "samples_per_s": 1000 / cpu,
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "generator_cpu_s_per_1000": 0.1,
        "foreign_cores": foreign,
        "errors": {},
    }


def test_disturbed_rounds_are_left_out_if_enough_others_are_left() -> None:
    loads = [of(1), of(9, foreign=1.0), of(2), of(3)]
    assert flat.quiet(loads) == [0, 2, 3]
    assert flat.quiet(loads[:3]) == [0, 1, 2]


def test_the_ratio_is_the_median_of_the_ratios_of_rounds() -> None:
    first, loads = [of(1), of(2), of(4)], [of(1.5), of(2), of(4.4)]
    line = flat.line(loads, first)
    assert line["/ first"] == pytest.approx(1.1)
    assert line["CPU s per 1,000"] == 2
    cells = ["here,", "512", "2", "500", "1", "2", "0.1", "0", "1.1", "3", "0"]
    assert flat.text({("here", 512): line}).splitlines()[1].split() == cells


class Waves:
    """Samples of which all in flight end in one turn, as with a server that commits in groups."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._waiting: list[asyncio.Future[None]] = []
        self.ended = 0

    def connect(self) -> Waves:
        return self

    def close(self) -> None:
        pass

    async def open(self) -> None:
        pass

    async def sample(self, _: Waves, __: int) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if len(self._waiting) == self._spec.in_flight:
            waiting, self._waiting = self._waiting, []
            await asyncio.sleep(0.01)
            for each in waiting:
                each.set_result(None)
        await waiter
        self.ended += 1

    def counts(self) -> dict[str, int]:
        return {}


async def test_the_window_of_a_load_holds_whole_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load.KINDS, "direct", Waves)  # type: ignore[arg-type]
    monkeypatch.setattr(load, "DRAIN_S", 0.1)
    result = await load.ClosedLoop(LoadSpec("http://x", "direct", 8, seconds=0.1, warm_up_s=0.0)).run()
    assert result["samples"] > 0
    assert result["samples"] % 8 == 0
