"""Garbage is collected by the clock: a pass looks at what one period has made, and the rare one finds the rest."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from collections.abc import Iterator

import pytest

from skyrl.runtime.processes import garbage


class Node:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


async def turns() -> None:
    """Long enough for a timer of 0 s."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_pass_looks_at_more_than_one_period_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of objects that are replaced, as renewed polls are, as many are freed as made: Python's own count stays low."""
    monkeypatch.setattr(garbage, "YOUNG_S", 0.0)
    garbage.collect_by_the_clock()
    polls, young = deque[list[None]]([[] for _ in range(5000)]), list[int]()
    for _ in range(20):
        for _ in range(1000):
            polls.append([])
            polls.popleft()
        young.append(len(gc.get_objects(generation=0)))
        await turns()
    assert all(1000 <= count < 2500 for count in young[1:]), young


async def test_only_the_pass_over_everything_finds_old_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "YOUNG_S", 0.0)
    garbage.collect_by_the_clock()
    node = Node()
    await turns()
    known, young = weakref.ref(node), weakref.ref(Node())
    del node
    await turns()
    assert young() is None
    assert known() is not None
    monkeypatch.setattr(garbage, "ALL_S", 0.0)
    garbage.collect_by_the_clock()
    await turns()
    assert known() is None


async def test_a_process_that_has_grown_looks_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"now": 2**30}
    monkeypatch.setattr(garbage, "LOOK_S", 0.0)
    monkeypatch.setattr(garbage, "YOUNG_S", 0.0)
    monkeypatch.setattr(garbage, "resident_bytes", lambda _: sizes["now"])
    garbage.collect_by_the_clock()
    node = Node()
    known = weakref.ref(node)
    await turns()
    del node
    sizes["now"] += garbage.GROWN_BYTES
    await turns()
    assert known() is not None
    sizes["now"] += 1
    await turns()
    assert known() is None
    passes = gc.get_stats()[2]["collections"]
    await turns()
    assert gc.get_stats()[2]["collections"] == passes, "it has not grown since"
