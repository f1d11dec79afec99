"""How much of what the gate has let in is with the inference server at a time, and which request is sent next.

vLLM takes any number of requests, and runs those of the lowest priority number first. But the process that takes them
reads them in the order in which they come: behind thousands of one tenant's samples, the first sample of another tenant
waits for half a minute before vLLM knows its priority. So only some more are sent than vLLM runs at once, and the
next one is that which vLLM would run next.

Before vLLMs of skyrl's own, a tenant that has less than its equal part there waits for nobody. So requests that hold
their places for long, because their adapter cannot be loaded or their client does not read, hold up no other tenant.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from skyrl.base.wire.errors import ErrorCategory, FailedRequest

AHEAD = 2
"""Times as many sequences are sent to skyrl's own vLLMs as they run at once, so that one that ends is followed at once,
whichever replica or adapter it was of."""
FEWEST, PER_TOKEN = 64, 12
"""Of sequences of so many tokens, FEWEST + PER_TOKEN * tokens at most: vLLM's front end does not take more than some
hundred in a second, so more of short ones would wait in it, and not for a place to run."""
PROMPT_CELLS = 2**16
"""Of logprobs of prompts. The front end takes some 5 microseconds for each, and does nothing else meanwhile."""

PASSED_S = 5.0
"""A request that has been with the server for so long is not in its front end any more, however short its sequences
were expected to be. It counts as its sequences alone, and the tenant's next ones are not expected to be short."""
MOST_CROWD = 4.0
FULL = 1 - 1e-9
"""All that may be with the inference server: parts are rounded."""


class Sent(Protocol):
    """What a request asks of the inference server. `prompt_cells` are the logprobs of its prompts."""

    @property
    def num_samples(self) -> int: ...

    @property
    def prompt_cells(self) -> int: ...


@dataclass(frozen=True)
class ByWork:
    """The part of all that may be with `servers` vLLMs, each of which runs so many sequences at once."""

    running: int
    servers: int

    def __call__(self, work: Sent, tokens: float) -> tuple[float, float]:
        """The part that a request takes whose sequences are expected to have so many tokens: at first, and after
        PASSED_S."""
        most, short = AHEAD * self.running, FEWEST + PER_TOKEN * tokens
        at_first = work.num_samples / (short if short < most else most) + work.prompt_cells / PROMPT_CELLS
        return at_first / self.servers, work.num_samples / most / self.servers


@dataclass(frozen=True)
class ByNumber:
    """At most so many requests, whatever they ask for and of whom they are."""

    most: int

    def __call__(self, work: Sent, tokens: float) -> tuple[float, float]:
        return 1 / self.most, 1 / self.most


@dataclass(slots=True, eq=False)
class Slot:
    """The place of a request at the inference server."""

    tenant: str
    part: float
    later: float
    sent_at: float
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    order: tuple[int, int]
    """Priority, and the number of its arrival."""
    work: Sent
    tokens: float
    goes: asyncio.Future[Slot]


@dataclass(slots=True)
class _Tenant:
    requests: int = 0
    """At the inference server."""
    part: float = 0.0
    """Of all that may be there, what they take together."""
    is_long: bool = False
    """A request took longer than PASSED_S, and since then none has been answered sooner."""
    waiting: OrderedDict[int, _Waiting] | None = None
    """By the number of the arrival, which is also the order of their priorities; None if none has waited."""


class Slots:
    """Requests are sent until they take all that may be with the inference server; the last one may be of any size.
    Beyond that a tenant gets what it has below its equal part, but not with a fixed number of requests: there the
    tenant goes next that has least. A request that waits fails when the server has answered nothing at all for
    `patience_s`.

    `crowd` tells how many times the requests that are there sample from as many adapters as the server runs at a time.
    So many times as much is sent, but not more than MOST_CROWD: vLLM then finds enough of the adapters that it runs."""

    def __init__(
        self, parts_of: ByWork | ByNumber, patience_s: float, crowd: Callable[[], float] | None = None
    ) -> None:
        self._parts_of = parts_of
        self._is_fixed = isinstance(parts_of, ByNumber)
        self._patience_s = patience_s
        self._crowd = crowd
        self._tenants: dict[str, _Tenant] = {}
        self._part = 0.0
        self._new: deque[Slot] = deque()
        """Those that take less later, in the order in which they were sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._arrivals = count()
        self._answers = 0
        self.waiting = 0

    def take(self, tenant: str, work: Sent, tokens: float) -> Slot | None:
        """The place of a request that may be sent now; the caller must call `give_back` at its end. If it may not be,
        None: then call `wait`, and nothing else before. Its sequences are expected to have so many tokens."""
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant()
        if state.waiting or (self._part >= FULL and not self._has_room(state)):
            return None
        return self._send(tenant, state, work, tokens)

    async def wait(self, tenant: str, work: Sent, tokens: float, priority: int) -> Slot:
        """The place of a request that `take` has refused, once it may be sent. A tenant's priorities never fall. Raises
        FailedRequest."""
        number, goes = next(self._arrivals), asyncio.get_running_loop().create_future()
        state = self._tenants[tenant]
        if state.waiting is None:
            state.waiting = OrderedDict()
        state.waiting[number] = _Waiting((priority, number), work, tokens, goes)
        self.waiting += 1
        self._look_later()
        try:
            answers = -1
            while answers != self._answers:
                answers = self._answers
                if (await asyncio.wait((goes,), timeout=self._patience_s))[0]:
                    return goes.result()
            raise FailedRequest(
                f"the inference server has answered no request for {self._patience_s:g} s, and this one waited for its "
                "turn",
                ErrorCategory.SERVER,
            )
        except BaseException:
            if goes.done():
                self.give_back(goes.result())
            else:
                del state.waiting[number]
                self.waiting -= 1
                if not state.requests and not state.waiting:
                    del self._tenants[tenant]
            raise

    def give_back(self, slot: Slot, *, answered: bool = False) -> None:
        """The request has ended. `answered`: with a result of the server."""
        self._answers += answered
        state = self._tenants[slot.tenant]
        slot.has_ended = True
        state.requests -= 1
        state.part -= slot.part
        self._part -= slot.part
        if answered and state.is_long and time.monotonic() - slot.sent_at < PASSED_S:
            state.is_long = False
        if not state.requests:
            state.part = 0.0  # else what was rounded adds up
            if not state.waiting:
                del self._tenants[slot.tenant]
                if not self._tenants:
                    self._part = 0.0
        while self._new and self._new[0].has_ended:
            self._new.popleft()
        if self._new and self._new[0].sent_at <= slot.sent_at - PASSED_S:
            self._age(slot.sent_at)
        if self.waiting:
            self._send_waiting()

    def _send(self, tenant: str, state: _Tenant, work: Sent, tokens: float) -> Slot:
        part, later = self._parts_of(work, math.inf if state.is_long else tokens)
        slot = Slot(tenant, part, later, time.monotonic())
        state.requests += 1
        state.part += part
        self._part += part
        if part > later:
            self._new.append(slot)
        return slot

    def _send_waiting(self) -> None:
        self._age(time.monotonic())
        while self.waiting and (found := self._next()) is not None:
            tenant, state = found
            assert state.waiting is not None
            _, first = state.waiting.popitem(last=False)
            self.waiting -= 1
            first.goes.set_result(self._send(tenant, state, first.work, first.tokens))
        if self.waiting:
            self._look_later()

    def _age(self, now: float) -> None:
        """Let those that were sent PASSED_S before `now`, or earlier, take what they take later. `now` may be past."""
        while self._new and (self._new[0].has_ended or self._new[0].sent_at <= now - PASSED_S):
            slot = self._new.popleft()
            if not slot.has_ended:
                state = self._tenants[slot.tenant]
                state.is_long = True
                state.part -= slot.part - slot.later
                self._part -= slot.part - slot.later
                slot.part = slot.later

    def _look_later(self) -> None:
        if self._timer is None and (self._new or self._crowd is not None):
            self._timer = asyncio.get_running_loop().call_later(PASSED_S / 4, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.waiting:
            self._send_waiting()

    def _has_room(self, state: _Tenant) -> bool:
        if self._is_fixed:
            return False
        room = self._room
        return self._part < room or state.part < room / len(self._tenants)

    @property
    def _room(self) -> float:
        return FULL if self._crowd is None else FULL * min(MOST_CROWD, max(1.0, self._crowd()))

    def _next(self) -> tuple[str, _Tenant] | None:
        """The tenant whose first waiting request goes next; None if none may."""
        waiting: Iterator[tuple[str, _Tenant]] = (each for each in self._tenants.items() if each[1].waiting)
        if self._is_fixed:
            return None if self._part >= FULL else min(waiting, key=lambda each: (each[1].requests, _order_of(each[1])))
        if self._part >= (room := self._room):
            equal = room / len(self._tenants)
            waiting = (each for each in waiting if each[1].part < equal)
        return min(waiting, key=lambda each: _order_of(each[1]), default=None)


def _order_of(state: _Tenant) -> tuple[int, int]:
    assert state.waiting is not None
    return next(iter(state.waiting.values())).order
