"""A burst of callbacks is spread over turns of the event loop."""

from __future__ import annotations

import asyncio

from skyrl.runtime.processes.turns import Turns


async def test_a_burst_is_spread_over_turns_in_its_order() -> None:
    turns, ran = Turns(3), list[int]()
    for number in range(10):
        turns.add(lambda number=number: ran.append(number))
    seen = [len(ran)]
    while len(ran) < 10:
        await asyncio.sleep(0)
        seen.append(len(ran))
    assert seen == [3, 6, 9, 10]
    assert ran == list(range(10))


async def test_what_comes_later_waits_for_those_before_and_does_not_add_to_a_turn() -> None:
    turns, ran = Turns(2), list[str]()
    for name in "abcd":
        turns.add(lambda name=name: ran.append(name))
    await asyncio.sleep(0)
    assert ran == ["a", "b", "c", "d"]
    turns.add(lambda: ran.append("e"))
    assert ran == ["a", "b", "c", "d"], "this turn has run two"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    turns.add(lambda: ran.append("f"))
    assert ran == ["a", "b", "c", "d", "e", "f"], "a single one runs at once"
