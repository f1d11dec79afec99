"""Suspects, samples during which the inference server died: how many run at a time, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from skyrl.sampling.retries import CrashIsolation


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Queue:
    """Suspects by name, and the turns that they get."""

    def __init__(self) -> None:
        self.suspects = CrashIsolation()
        self.running: dict[str, bool] = {}
        """The suspects that have their turn now, each with the flag that it runs alone."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, deaths: int, *names: str) -> None:
        for _ in names:
            self.suspects.add(deaths)
        for name in names:
            self._tasks.add(asyncio.create_task(self._wait(deaths, name)))
        await settle()

    async def _wait(self, deaths: int, name: str) -> None:
        self.running[name] = await self.suspects.wait_turn(deaths)

    async def end(self, deaths: int, *names: str) -> None:
        for name in names:
            del self.running[name]
            self.suspects.end_turn()
            self.suspects.remove(deaths)
        await settle()


def names(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@pytest.mark.parametrize(("count", "together"), [(1, 1), (8, 1), (9, 8), (64, 8), (65, 64), (2000, 64)], ids=str)
async def test_suspects_run_in_groups_smaller_than_their_number(count: int, together: int) -> None:
    queue = Queue()
    await queue.join(2, *names(count))
    assert len(queue.running) == together
    assert set(queue.running.values()) == {together == 1}


async def test_suspects_get_turns_in_the_order_of_arrival() -> None:
    queue = Queue()
    await queue.join(2, *names(20))
    ended: list[str] = []
    while queue.running:
        first = next(iter(queue.running))
        ended.append(first)
        await queue.end(2, first)
    assert ended == names(20)


async def test_suspects_of_more_deaths_go_first_and_in_their_own_group() -> None:
    queue = Queue()
    await queue.join(2, *names(10))
    assert len(queue.running) == 8
    worse = names(9, "worse ")
    await queue.join(3, *worse)
    await queue.end(2, *list(queue.running)[:7])
    assert len(queue.running) == 1, "the last suspect of the group runs alone"
    await queue.end(2, *queue.running)
    assert list(queue.running) == worse[:8]
    await queue.end(3, *worse[:8])
    assert list(queue.running) == worse[8:]
    await queue.end(3, worse[8])
    assert queue.running == {"8": True}
