"""What a change costs the forwarding path: the API's CPU per sample in this tree and in another checkout, in turns.

Usage: python -m benchmarks.beside /path/to/other/checkout [--rounds 60]

Both servers run all the time, in front of one null upstream, and get the same number of samples in turns. So a busy
machine slows both. The ratio is the median of the rounds' ratios; `ratio_95` is the median's 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from math import ceil, sqrt
from pathlib import Path
from statistics import median, quantiles

from benchmarks.processes import cpu_seconds, parts_of
from benchmarks.samples import LoadSpec, TinkerSamples
from benchmarks.stage import NullUpstream, gateway
from skyrl.demo.server import DemoServer

IN_FLIGHT = 64
SAMPLES = 1_500
WARM_UP = 2_000


class Side:
    """One server, and the samples that are sent to it."""

    def __init__(self, server: DemoServer) -> None:
        self._pid = parts_of(server.pid)["api"]
        self._samples = TinkerSamples(LoadSpec(server.url, "tinker", IN_FLIGHT, seconds=0))
        self._sent = 0

    async def open(self) -> None:
        await self._samples.open()
        await self.spend(WARM_UP)

    async def spend(self, samples: int) -> float:
        """CPU milliseconds of the API process for one of so many samples. Raises RuntimeError for a wrong answer."""
        connection = self._samples.connect()
        await self._samples.heartbeat(connection)
        connection.close()
        numbers = iter(range(self._sent, self._sent + samples))
        self._sent += samples
        before = cpu_seconds(self._pid)
        await asyncio.gather(*(self._worker(numbers) for _ in range(IN_FLIGHT)))
        return (cpu_seconds(self._pid) - before) / samples * 1e3

    async def _worker(self, numbers: object) -> None:
        connection = self._samples.connect()
        for number in numbers:  # type: ignore[attr-defined]
            if (problem := await self._samples.sample(connection, number)) is not None:
                raise RuntimeError(problem)
        connection.close()


async def measure(here: Side, other: Side, rounds: int) -> dict[str, object]:
    await here.open()
    await other.open()
    spent: list[tuple[float, float]] = []
    for number in range(rounds):  # the first of a pair alternates: the second finds warmer caches
        if number % 2:
            spent.append((await here.spend(SAMPLES), await other.spend(SAMPLES)))
        else:
            second = await other.spend(SAMPLES)
            spent.append((await here.spend(SAMPLES), second))
    ratios = sorted(ours / theirs for ours, theirs in spent)
    low, _, high = quantiles(ratios, n=4)
    aside = ceil(0.98 * sqrt(rounds))  # 1.96 standard deviations (sqrt(rounds) / 2) of a median's rank
    middle = rounds // 2
    return {
        "rounds": rounds,
        "samples_per_round": SAMPLES,
        "here_ms": round(median(ours for ours, _ in spent), 4),
        "other_ms": round(median(theirs for _, theirs in spent), 4),
        "ratio": round(median(ratios), 4),
        "ratio_95": [round(ratios[max(0, middle - aside)], 4), round(ratios[min(rounds - 1, middle + aside)], 4)],
        "ratio_quartiles": [round(low, 4), round(high, 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    with NullUpstream() as upstream, gateway(upstream.url) as here:
        with contextlib.chdir(options.other):  # `python -m` takes the package from the working directory
            other = contextlib.ExitStack()
            other_server = other.enter_context(gateway(upstream.url))
        with other:
            print(json.dumps(asyncio.run(measure(Side(here), Side(other_server), options.rounds))))


if __name__ == "__main__":
    main()
