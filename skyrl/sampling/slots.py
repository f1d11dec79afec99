"""How much of what the gate has let in is with the inference server at a time, and which request is sent next.

vLLM takes any number of requests, and runs those of the lowest priority number first. But the process that takes them
reads them in the order in which they come: behind thousands of one tenant's samples, the first sample of another tenant
waits for half a minute before vLLM knows its priority. So only some more are sent than vLLM runs at once, and the
next one is that which vLLM would run next.

A tenant that has less than its equal part at the server waits for nobody. So requests that hold their places for long,
because their adapter cannot be loaded or their client does not read, hold up no other tenant.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from skyrl.base.wire.errors import ErrorCategory, FailedRequest

AHEAD = 2
"""Times as many sequences are sent to skyrl's own vLLMs as they run at once, so that one that ends is followed at once,
whichever replica or adapter it was of."""
FEWEST, PER_TOKEN = 16, 8
"""Of sequences of so many tokens, FEWEST + PER_TOKEN * tokens at most: vLLM's front end does not take more than some
hundred in a second, so more of short ones would wait in it, and not for a place to run."""
PROMPT_CELLS = 2**15
"""Of logprobs of prompts. The front end takes some 5 microseconds for each, and does nothing else meanwhile."""

FULL = 1 - 1e-9
"""All that may be with the inference server: parts are rounded."""


class Sent(Protocol):
    """What a request asks of the inference server. `prompt_cells` are the logprobs of its prompts."""

    @property
    def num_samples(self) -> int: ...

    @property
    def prompt_cells(self) -> int: ...


PartOf = Callable[[Sent, float], float]
"""The part of all that may be with the inference server that a request takes whose sequences are expected to have so
many tokens."""


def by_number(most: int) -> PartOf:
    """At most so many requests, whatever they ask for."""
    return lambda work, tokens: 1 / most


def by_work(running: int, servers: int) -> PartOf:
    """For `servers` vLLMs that run so many sequences at once each."""

    def part_of(work: Sent, tokens: float) -> float:
        sequences = min(AHEAD * running, FEWEST + PER_TOKEN * tokens)
        return (work.num_samples / sequences + work.prompt_cells / PROMPT_CELLS) / servers

    return part_of


@dataclass(slots=True, eq=False)
class _Waiting:
    order: tuple[int, int]
    """Priority, and the number of its arrival."""
    part: float
    goes: asyncio.Future[None]


@dataclass(slots=True)
class _Tenant:
    requests: int = 0
    """At the inference server."""
    part: float = 0.0
    """Of all that may be there, what they take together."""
    waiting: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict)
    """By the number of the arrival, which is also the order of their priorities."""


class Slots:
    """Requests are sent until they take all that may be with the inference server; the last one may be of any size.
    Beyond that a tenant gets what it has below its equal part. A request that waits fails when the server has answered
    nothing at all for `patience_s`.

    `crowd` tells how many times the requests that are there sample from as many adapters as the server runs at a time.
    So many times as much is sent: vLLM then finds enough of the adapters that it runs."""

    def __init__(self, part_of: PartOf, patience_s: float, crowd: Callable[[], float] | None = None) -> None:
        self.part_of = part_of
        self._patience_s = patience_s
        self._crowd = crowd
        self._tenants: dict[str, _Tenant] = {}
        self._part = 0.0
        self._arrivals = count()
        self._answers = 0
        self.waiting = 0

    def take(self, tenant: str, part: float) -> bool:
        """Whether a request that takes this part may be sent now. If so, the caller must call `give_back` at its end;
        if not, it may `wait`."""
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant()
        elif state.waiting or (self._part >= FULL and not self._has_room(state)):
            return False
        state.requests += 1
        state.part += part
        self._part += part
        return True

    async def wait(self, tenant: str, part: float, priority: int) -> None:
        """Return when a request may be sent that `take` has refused; then call `give_back` at its end. A tenant's
        priorities never fall. Raises FailedRequest."""
        number, goes = next(self._arrivals), asyncio.get_running_loop().create_future()
        self._tenants[tenant].waiting[number] = _Waiting((priority, number), part, goes)
        self.waiting += 1
        try:
            answers = -1
            while answers != self._answers:
                answers = self._answers
                if (await asyncio.wait((goes,), timeout=self._patience_s))[0]:
                    return
            raise FailedRequest(
                f"the inference server has answered no request for {self._patience_s:g} s, and this one waited for its "
                "turn",
                ErrorCategory.SERVER,
            )
        except BaseException:
            if goes.done():
                self.give_back(tenant, part)
            else:
                del self._tenants[tenant].waiting[number]
                self.waiting -= 1
            raise

    def give_back(self, tenant: str, part: float, *, answered: bool = False) -> None:
        """The request has ended. `answered`: with a result of the server."""
        self._answers += answered
        state = self._tenants[tenant]
        state.requests -= 1
        state.part -= part
        self._part -= part
        if not state.requests:
            state.part = 0.0  # else what was rounded adds up
            if not state.waiting:
                del self._tenants[tenant]
                if not self._tenants:
                    self._part = 0.0
        while self.waiting and (first := self._next()) is not None:
            _, waiting = first.waiting.popitem(last=False)
            self.waiting -= 1
            first.requests += 1
            first.part += waiting.part
            self._part += waiting.part
            waiting.goes.set_result(None)

    def _has_room(self, state: _Tenant) -> bool:
        room = self._room
        return self._part < room or state.part < room / len(self._tenants)

    @property
    def _room(self) -> float:
        return FULL if self._crowd is None else FULL * max(1.0, self._crowd())

    def _next(self) -> _Tenant | None:
        """The tenant whose first waiting request goes next; None if none may."""
        waiting: Iterator[_Tenant] = (state for state in self._tenants.values() if state.waiting)
        if self._part >= (room := self._room):
            equal = room / len(self._tenants)
            waiting = (state for state in waiting if state.part < equal)
        return min(waiting, key=lambda state: next(iter(state.waiting.values())).order, default=None)
