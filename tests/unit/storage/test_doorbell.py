"""The doorbell: words arrive, a ring never blocks, and a lost ring is counted."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.storage.doorbell import MAX_DATAGRAM, Doorbell, DoorbellListener


class Listener:
    """Collects rings, and waits for a number of them."""

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


async def test_every_listener_hears_a_ring_although_another_is_away(path: Path, tmp_path: Path) -> None:
    all_received = [Listener(), Listener()]
    listeners = [
        DoorbellListener(tmp_path / f"{number}.sock", received) for number, received in enumerate(all_received)
    ]
    for listener in listeners:
        listener.start()
    bell = Doorbell(tmp_path / "0.sock", path, tmp_path / "1.sock")
    bell.ring(["a"])
    for received in all_received:
        await received.wait_for(words=1)
    assert bell.lost == 1
    bell.close()
    for listener in listeners:
        listener.close()


async def test_a_ring_arrives_with_or_without_words(path: Path, bell: Doorbell) -> None:
    received = Listener()
    listener = DoorbellListener(path, received)
    listener.start()
    bell.ring(["a", "b"])
    bell.ring()
    await received.wait_for(rings=2)
    listener.close()
    assert received.rings == [["a", "b"], []]
    assert bell.lost == 0


async def test_only_the_owner_of_the_socket_may_ring(path: Path) -> None:
    listener = DoorbellListener(path, Listener())
    listener.start()
    assert mode_of(path) == 0o600
    listener.close()
    assert mode_of(path) is None
    listener.close()


async def test_many_words_arrive_whole_in_several_datagrams(path: Path, bell: Doorbell) -> None:
    received = Listener()
    listener = DoorbellListener(path, received)
    listener.start()
    words = [f"{n:036d}" for n in range(5_000)]
    bell.ring(words)
    await received.wait_for(words=len(words))
    listener.close()
    assert received.words == words
    assert 1 < len(received.rings) <= 1 + 37 * len(words) // (MAX_DATAGRAM - 37)
    assert bell.lost == 0


async def test_a_ring_without_a_listener_is_counted_as_lost(path: Path, bell: Doorbell) -> None:
    bell.ring(["a"])
    assert bell.lost == 1
    received = Listener()
    listener = DoorbellListener(path, received)
    listener.start()
    bell.ring(["b"])
    await received.wait_for(rings=1)
    listener.close()
    bell.ring(["c"])
    assert received.words == ["b"]
    assert bell.lost == 2


async def test_a_ring_does_not_block_while_the_listener_does_not_read(path: Path, bell: Doorbell) -> None:
    received = Listener()
    listener = DoorbellListener(path, received)
    listener.start()
    for n in range(2_000):  # the listener runs on the same event loop, so it cannot read meanwhile
        bell.ring([str(n)])
    assert bell.lost > 0
    await received.wait_for(rings=2_000 - bell.lost)
    listener.close()


async def test_a_listener_takes_over_the_socket_path_of_a_dead_one(path: Path, bell: Doorbell) -> None:
    old, new = Listener(), Listener()
    dead = DoorbellListener(path, old)
    dead.start()
    listener = DoorbellListener(path, new)
    listener.start()
    bell.ring(["a"])
    await new.wait_for(rings=1)
    assert (old.rings, new.rings) == ([], [["a"]])
    listener.close()
    dead.close()
