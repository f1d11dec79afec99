"""The doorbell: words arrive, nothing blocks, a lost ring is counted."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.notify.doorbell import MAX_DATAGRAM, Doorbell, DoorbellListener


class Heard:
    """What was rung, and a way to wait for it."""

    def __init__(self) -> None:
        self.rings: list[list[str]] = []
        self._changed = asyncio.Event()

    def __call__(self, words: list[str]) -> None:
        self.rings.append(words)
        self._changed.set()

    @property
    def words(self) -> list[str]:
        return [word for ring in self.rings for word in ring]

    async def wait_for(self, rings: int = 0, words: int = 0) -> None:
        async with asyncio.timeout(60):
            while len(self.rings) < rings or len(self.words) < words:
                self._changed.clear()
                await self._changed.wait()


def mode_of(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bell.sock"


@pytest.fixture
def bell(path: Path) -> Iterator[Doorbell]:
    bell = Doorbell(path)
    yield bell
    bell.close()


async def test_all_listeners_hear_and_one_that_is_away_costs_the_others_nothing(path: Path, tmp_path: Path) -> None:
    here = [Heard(), Heard()]
    listeners = [DoorbellListener(tmp_path / f"{number}.sock", heard) for number, heard in enumerate(here)]
    for listener in listeners:
        listener.start()
    bell = Doorbell(tmp_path / "0.sock", path, tmp_path / "1.sock")
    bell.ring(["a"])
    for heard in here:
        await heard.wait_for(words=1)
    assert bell.lost == 1
    bell.close()
    for listener in listeners:
        listener.close()


async def test_words_and_silence_both_ring(path: Path, bell: Doorbell) -> None:
    heard = Heard()
    listener = DoorbellListener(path, heard)
    listener.start()
    bell.ring(["a", "b"])
    bell.ring()
    await heard.wait_for(rings=2)
    listener.close()
    assert heard.rings == [["a", "b"], []]
    assert bell.lost == 0


async def test_only_the_owner_may_ring(path: Path) -> None:
    listener = DoorbellListener(path, Heard())
    listener.start()
    assert mode_of(path) == 0o600
    listener.close()
    assert mode_of(path) is None
    listener.close()


async def test_many_words_are_split_between_words(path: Path, bell: Doorbell) -> None:
    heard = Heard()
    listener = DoorbellListener(path, heard)
    listener.start()
    words = [f"{n:036d}" for n in range(5_000)]
    bell.ring(words)
    await heard.wait_for(words=len(words))
    listener.close()
    assert heard.words == words
    assert 1 < len(heard.rings) <= 1 + 37 * len(words) // (MAX_DATAGRAM - 37)
    assert bell.lost == 0


async def test_ring_that_nobody_hears_is_counted_and_harmless(path: Path, bell: Doorbell) -> None:
    bell.ring(["a"])
    assert bell.lost == 1
    heard = Heard()
    listener = DoorbellListener(path, heard)
    listener.start()
    bell.ring(["b"])
    await heard.wait_for(rings=1)
    listener.close()
    bell.ring(["c"])
    assert heard.words == ["b"]
    assert bell.lost == 2


async def test_listener_that_does_not_read_never_blocks_the_ringer(path: Path, bell: Doorbell) -> None:
    heard = Heard()
    listener = DoorbellListener(path, heard)
    listener.start()
    for n in range(2_000):  # the listener's loop is this one: it cannot read meanwhile
        bell.ring([str(n)])
    assert bell.lost > 0
    await heard.wait_for(rings=2_000 - bell.lost)
    listener.close()


async def test_path_of_a_dead_predecessor_is_taken_over(path: Path, bell: Doorbell) -> None:
    old, new = Heard(), Heard()
    dead = DoorbellListener(path, old)
    dead.start()
    listener = DoorbellListener(path, new)
    listener.start()
    bell.ring(["a"])
    await new.wait_for(rings=1)
    assert (old.rings, new.rings) == ([], [["a"]])
    listener.close()
    dead.close()
