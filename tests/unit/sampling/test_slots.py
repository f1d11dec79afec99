"""Which request is sent next, and how much is with the inference server at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.sampling import slots as module
from skyrl.sampling.slots import AHEAD, FEWEST, MOST_CROWD, PROMPT_CELLS, ByNumber, ByWork, Slot, Slots

NEVER_S, LONG_TOKENS = 1e6, 1e6
TWO, FOUR = ByWork(running=2 // AHEAD, servers=1), ByWork(running=4 // AHEAD, servers=1)
"""Sequences that are not short."""


@dataclass
class Asked:
    num_samples: int = 1
    prompt_cells: int = 0


class Server:
    """Takes requests through slots; notes the order in which they are sent."""

    def __init__(self, bound: ByWork | ByNumber, patience_s: float = NEVER_S, tokens: float = LONG_TOKENS) -> None:
        self.slots = Slots(bound, patience_s)
        self.tokens = tokens
        self.sent: list[str] = []

    @asynccontextmanager
    async def place(self, tenant: str, asked: Asked, priority: int) -> AsyncIterator[None]:
        slot = self.slots.take(tenant, asked, self.tokens)
        if slot is None:
            slot = await self.slots.wait(tenant, asked, self.tokens, priority)
        try:
            yield
        finally:
            self.slots.give_back(slot, answered=True)

    def ask(self, name: str, priority: int = 0, asked: Asked | None = None) -> Request:
        """A request of the tenant that is the first letter of the name."""
        return Request(self, name, priority, asked or Asked())


class Request:
    def __init__(self, server: Server, name: str, priority: int, asked: Asked) -> None:
        self._server, self._end = server, asyncio.Event()
        self.task = asyncio.create_task(self._run(name, priority, asked))

    async def _run(self, name: str, priority: int, asked: Asked) -> None:
        async with self._server.place(name[0], asked, priority):
            self._server.sent.append(name)
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task
        await settled()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_tenant_fills_the_bound_and_its_requests_follow_in_their_order() -> None:
    server = Server(TWO)
    asked = [server.ask(f"a{number}", number) for number in range(5)]
    await settled()
    assert (server.sent, server.slots.waiting) == (["a0", "a1"], 3)
    for request in asked:
        await request.end()
    assert server.sent == [f"a{number}" for number in range(5)]
    assert server.slots.take("b", Asked(4096), LONG_TOKENS)


def took(slots: Slots, count: int, tenant: str = "a") -> list[Slot]:
    """The places of so many requests, of which all but the last one are sent."""
    places = [slots.take(tenant, Asked(), LONG_TOKENS) for _ in range(count + 1)]
    assert [place is not None for place in places] == [True] * count + [False]
    return [place for place in places if place is not None]


def test_a_number_of_requests_is_kept_exactly() -> None:
    for most in range(1, 200):
        slots = Slots(ByNumber(most), NEVER_S)
        for _ in range(3):
            for place in took(slots, most):
                slots.give_back(place)


async def test_a_fixed_number_holds_for_all_tenants_and_who_has_least_goes_next() -> None:
    server = Server(ByNumber(2))
    flood = [server.ask(f"a{number}", number) for number in range(5)]
    others = [server.ask(f"{tenant}0", 9) for tenant in "bc"]
    await settled()
    assert server.sent == ["a0", "a1"]
    for request, then in ((flood[0], "b0"), (others[0], "c0"), (others[1], "a2"), (flood[1], "a3"), (flood[2], "a4")):
        await request.end()
        assert server.sent[-1] == then
    for request in flood[3:]:
        await request.end()
    assert server.slots.take("d", Asked(), LONG_TOKENS)


async def test_another_tenant_does_not_wait_behind_a_flood() -> None:
    server = Server(FOUR)
    flood = [server.ask(f"a{number}", number) for number in range(20)]
    await settled()
    others = [server.ask(f"b{number}", 7 + number) for number in range(3)]
    await settled()
    assert server.sent == ["a0", "a1", "a2", "a3", "b0", "b1"], "up to its half, and no further"
    for request in flood[:3]:
        await request.end()
    assert server.sent[6:] == ["a4"], "more than the bound was sent until the third end"
    await others[0].end()
    assert server.sent[7:] == ["a5", "b2"], "a5 has the lower priority, and b less than its half"
    for request in (*flood, *others):
        request.task.cancel()


async def test_of_several_tenants_the_lowest_priority_goes_next() -> None:
    server = Server(TWO)
    holds = [server.ask("a0"), server.ask("b0")]
    await settled()
    waiting = [server.ask("a1", 30), server.ask("b1", 10), server.ask("a2", 40), server.ask("b2", 20)]
    await settled()
    assert server.sent == ["a0", "b0"]
    for request in (holds[0], holds[1], waiting[1], waiting[3]):
        await request.end()
    assert server.sent[2:] == ["b1", "a1", "b2", "a2"], "b1 comes first; then each has its half"
    for request in waiting:
        await request.end()


async def test_a_request_takes_the_part_of_its_sequences_and_one_of_any_size_is_sent() -> None:
    server = Server(ByWork(running=4, servers=1))
    asked = [server.ask(f"a{number}", asked=Asked(count)) for number, count in enumerate((7, 4096, 1))]
    await settled()
    assert server.sent == ["a0", "a1"], "the last one may exceed what may be there"
    await asked[0].end()
    assert server.sent == ["a0", "a1"]
    await asked[1].end()
    await asked[2].end()
    assert server.sent == ["a0", "a1", "a2"]


def test_what_a_request_takes_follows_from_its_sequences_their_tokens_and_its_scores() -> None:
    parts_of, one = ByWork(running=256, servers=2), 1 / (2 * 256 * AHEAD)
    assert parts_of(Asked(), 256) == (one, one)
    assert parts_of(Asked(4), 1e5) == (4 * one, 4 * one)
    assert parts_of(Asked(), 0) == (1 / (2 * FEWEST), one), "sequences that end at once"
    assert parts_of(Asked(), 8) == (1 / (2 * 160), one)
    assert parts_of(Asked(1, PROMPT_CELLS), 0) == (1 / 2 + 1 / (2 * FEWEST), one)
    assert ByNumber(3)(Asked(4096, 10**9), 0) == (1 / 3, 1 / 3)


async def test_sequences_that_turn_out_to_be_long_take_less_and_so_do_the_tenants_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant's answers were short, and now they are not: after a while the server has as many as it takes."""
    server = Server(ByWork(running=256, servers=1), tokens=0.0)
    asked = [server.ask(f"a{number}") for number in range(1000)]
    await settled()
    assert len(server.sent) == FEWEST
    monkeypatch.setattr(module, "PASSED_S", 0.0)
    async with asyncio.timeout(30):
        while len(server.sent) < AHEAD * 256:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await settled()
    assert len(server.sent) == AHEAD * 256
    for request in asked:
        request.task.cancel()
    await settled()
    assert server.slots.waiting == 0
    monkeypatch.setattr(module, "PASSED_S", NEVER_S)
    later = [server.ask(f"a{number}") for number in range(100)]
    await settled()
    assert len(server.sent) == AHEAD * 256 + FEWEST, "a tenant without requests is not known"
    for request in later:
        request.task.cancel()


async def test_a_tenant_whose_answers_are_short_again_is_known_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PASSED_S", 0.0)
    server = Server(ByWork(running=256, servers=1), tokens=0.0)
    asked = [server.ask(f"a{number}") for number in range(300)]
    await settled()
    server.slots._look()
    await settled()
    assert len(server.sent) == 300, "they took long"
    monkeypatch.setattr(module, "PASSED_S", NEVER_S)
    for request in asked[:299]:
        await request.end()
    asked = asked[299:] + [server.ask(f"a{number}") for number in range(300)]
    await settled()
    assert len(server.sent) == 300 + FEWEST
    for request in asked:
        request.task.cancel()


async def test_nothing_is_kept_of_requests_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(ByWork(running=256, servers=1), tokens=0.0)
    held = server.ask("held")
    await settled()
    for number in range(100):
        await server.ask(f"a{number}").end()
    assert len(server.slots._new) == 101, "behind one that may still be in the front end"
    monkeypatch.setattr(module, "PASSED_S", 0.0)
    await server.ask("a").end()
    assert len(server.slots._new) == 0
    await held.end()
    assert not server.slots._tenants
    assert not server.slots._new


async def test_with_more_adapters_than_the_server_runs_at_a_time_more_is_sent_up_to_a_bound() -> None:
    adapters = 1
    slots = Slots(FOUR, NEVER_S, lambda: adapters / 8)
    took(slots, 4)
    adapters = 12
    took(slots, 2)
    took(slots, 3, "b")
    adapters = 8_000
    took(slots, int(4 * MOST_CROWD) - 9)
    took(slots, int(4 * MOST_CROWD) // 2 - 3, "b")


async def test_a_cancelled_request_gives_its_place_to_the_next_one() -> None:
    server = Server(ByNumber(1))
    first, second, third = (server.ask(f"a{number}") for number in range(3))
    await settled()
    await second.cancel()
    assert server.slots.waiting == 1
    await first.cancel()
    assert server.sent == ["a0", "a2"]
    await third.end()


async def test_a_request_that_is_cancelled_when_its_turn_has_come_gives_it_on() -> None:
    server = Server(ByNumber(1))
    first, second, third = (server.ask(f"a{number}") for number in range(3))
    await settled()
    first._end.set()
    first.task.add_done_callback(lambda _: second.task.cancel())  # its turn has come, and it does not know that yet
    await asyncio.wait((second.task,))
    await settled()
    assert server.sent == ["a0", "a2"]
    await third.end()
    assert server.slots.take("b", Asked(4096), LONG_TOKENS)


async def test_a_request_fails_if_the_server_answers_nothing_while_it_waits() -> None:
    server = Server(ByNumber(1), patience_s=0.02)
    first, second = server.ask("a0"), server.ask("a1")
    with pytest.raises(FailedRequest, match=r"^the inference server has answered no request for 0.02 s") as failed:
        await second.task
    assert failed.value.category is ErrorCategory.SERVER
    assert server.slots.waiting == 0
    await first.end()
    assert server.sent == ["a0"]


async def test_answers_to_others_are_reason_to_wait_on() -> None:
    server = Server(ByNumber(1), patience_s=0.5)
    requests = [server.ask(f"a{number}") for number in range(10)]
    for request in requests:
        await asyncio.sleep(0.12)
        await request.end()
    assert server.sent == [f"a{number}" for number in range(10)], "the last one has waited for more than a second"
