"""What happens between two tries of a request: its state so far, its pauses, and the search for the sample that kills.

`Attempts` is the state of one request, `Running` has those of all that run, and `SampleProgress` is what others may
see of one. `Waits` pauses until the next try, or until a dying server has gone. `CrashIsolation` sends suspects
(samples that were interrupted more than once) a few at a time, then one by one, so that the sample that kills the
server is found; docs/decisions/interrupted-samples.md says why. `StaleWeightsRetry` decides about an answer that began
with other full weights than the request wants.

The forwarding client decides what an interruption is, and after how many a sample fails.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from skyrl.base.types.weights import AdapterVersion, WeightsRef
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.http.client import HttpClient
from skyrl.runtime.processes.backoff import Backoff
from skyrl.sampling.exchanges import Exchange
from skyrl.sampling.servers import CurrentWeightsCheck, Endpoint, Health, OtherWeights, health_of, server_failure
from skyrl.storage.db.faults import DatabaseError, reason


class SampleWait(StrEnum):
    """What a sample waits for before it is sent (again)."""

    AWAY = "away"
    """The inference server."""
    BUSY = "busy"
    """The inference server, which answers 429."""
    LOADING = "loading"
    """The load of its adapter into the inference server."""
    SUSPECTS = "suspects"
    """Other samples that were interrupted as often: they are sent a few at a time."""
    TURN = "turn"
    """Samples that come before it: the inference server has as many as are sent at a time."""


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """`waits_for` is None while the inference server has the sample. `for_s` is how long it has had it or, if the
    sample waits, how long the sample has waited."""

    waits_for: SampleWait | None
    for_s: float
    has_adapter: bool
    """Whether the sample comes from an adapter."""


T = TypeVar("T")

SETTLED_S = 2.0
"""A try that has run for this long has reached a server that runs: a server that is away fails a try sooner."""
FREE_INTERRUPTIONS = 1
"""A sample that was interrupted more often is a suspect: it waits for its turn before it is sent again."""


class Attempts(Generic[T]):
    """The state of one request. `deadline` is in the event loop's time; `backoff` gives the pauses between tries."""

    def __init__(self, exchange: Exchange[T], headers: Mapping[str, str], deadline: float, backoff: Backoff) -> None:
        self.exchange = exchange
        self.headers = headers
        self.deadline = deadline
        self.failed: Endpoint | None = None
        """The endpoint of the last try if that try failed; the next try looks the endpoint up again."""
        self.interruptions = 0
        """How often the connection broke, or the server died, while the server had the request."""
        self.sent_alone = False
        """Whether no other suspect was sent during the last try."""
        self.was_alone = False
        """Whether no other request of this process was sent during the last try."""
        self.deaths = 0
        """How often the server's engine died during a try that was alone."""
        self.aborts = 0
        """How often vLLM aborted the sample."""
        self.errors = 0
        """How often a server answered 5xx and then reported good health."""
        self.reloads: dict[Endpoint, int] = {}
        """How often each server has lost the adapter."""
        self.backoff = backoff
        self.trouble = "no inference server has been published"
        """The last failure, for the message when the deadline passes."""
        self.sent_at: float | None = None
        """When the running try was sent, in the event loop's time; None between tries."""
        self._waits_for: SampleWait | None = None
        self._waits_since = 0.0

    def wait_for(self, what: SampleWait, now: float) -> None:
        """Note what the next try waits for. If it is what the last try waited for, too, the wait goes on."""
        if what is not self._waits_for or self._has_settled(now):
            self._waits_for, self._waits_since = what, now
        self.sent_at = None

    def progress(self, now: float) -> SampleProgress:
        """Where the request stands at `now`, in the event loop's time."""
        has_adapter = isinstance(self.exchange.weights, AdapterVersion)
        if self.sent_at is not None and (self._waits_for is None or self._has_settled(now)):
            return SampleProgress(None, now - self.sent_at, has_adapter)
        if self._waits_for is None:  # nothing was sent yet, and nothing has failed
            return SampleProgress(None, 0.0, has_adapter)
        return SampleProgress(self._waits_for, now - self._waits_since, has_adapter)

    def _has_settled(self, now: float) -> bool:
        return self.sent_at is not None and now - self.sent_at > SETTLED_S

    @property
    def is_suspect(self) -> bool:
        """Whether this sample may be the one that kills the server."""
        return self.interruptions > FREE_INTERRUPTIONS


class Running:
    """The running requests by their ids, and how many of them sample from each adapter."""

    def __init__(self) -> None:
        self._by_id: dict[str, Attempts[Any]] = {}
        self._of_adapters: Counter[AdapterVersion] = Counter()

    def add(self, attempts: Attempts[Any]) -> None:
        self._by_id[attempts.exchange.request_id] = attempts
        if isinstance(weights := attempts.exchange.weights, AdapterVersion):
            self._of_adapters[weights] += 1

    def remove(self, attempts: Attempts[Any]) -> None:
        self._by_id.pop(attempts.exchange.request_id, None)
        if isinstance(weights := attempts.exchange.weights, AdapterVersion):
            self._of_adapters[weights] -= 1
            if not self._of_adapters[weights]:
                del self._of_adapters[weights]

    def progress(self, request_id: str) -> SampleProgress | None:
        """Where a request stands; None for a request that does not run."""
        attempts = self._by_id.get(request_id)
        return None if attempts is None else attempts.progress(asyncio.get_running_loop().time())

    @property
    def adapters(self) -> int:
        """How many adapters are sampled from. Thousands of polls may ask in a second."""
        return len(self._of_adapters)


FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_GATEWAY_BACKOFF_S = 5.0
"""After 502 and 504. A proxy also gives these answers for a sample that kills the server, so the pauses are longer."""
MAX_RETRY_AFTER_S = 30.0
MAX_DYING_S = 5.0


def backoff() -> Backoff:
    """The pauses of a new request."""
    return Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, jitter=0.25)


class Waits:
    """`replicas` are the URLs of the servers behind skyrl's own router; the caller may change them. `deadline_s` is how
    long a request may take, for the message when it took longer."""

    def __init__(
        self, transport: HttpClient, headers: Mapping[str, str], replicas: Collection[str], deadline_s: float
    ) -> None:
        self._transport = transport
        self._headers = headers
        self._replicas = replicas
        self._deadline_s = deadline_s

    async def back_off(
        self,
        attempts: Attempts[Any],
        retry_after_s: float = 0.0,
        waits_for: SampleWait = SampleWait.AWAY,
        *,
        is_long: bool = False,
    ) -> None:
        """Wait, longer each time: this time at least `retry_after_s`, up to MAX_RETRY_AFTER_S. With `is_long` pauses
        grow up to MAX_GATEWAY_BACKOFF_S.

        Raises FailedRequest if the wait would end after the deadline.
        """
        now = asyncio.get_running_loop().time
        attempts.wait_for(waits_for, now())
        pause_s = attempts.backoff.pause(MAX_GATEWAY_BACKOFF_S if is_long else None)
        wait_s = max(pause_s, min(retry_after_s, MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.25))
        if now() + wait_s > attempts.deadline:
            raise self.deadline_failure(attempts)
        await asyncio.sleep(wait_s)

    async def wait_out_death(self, server: Endpoint, attempts: Attempts[Any]) -> None:
        """Wait at least one pause, and then until the server is not dying: it would fail a request that is sent now.

        A dying vLLM fails all requests in flight with 500 or a reset, and exits within about a second.
        """
        await self.back_off(attempts)
        await self.wait_while_dying(server, attempts)

    async def wait_while_dying(self, server: Endpoint, attempts: Attempts[Any]) -> None:
        """For a replica behind the router at most MAX_DYING_S: if it hangs, the router sends the sample elsewhere."""
        now = asyncio.get_running_loop().time
        until = now() + MAX_DYING_S if server.url in self._replicas else attempts.deadline
        while await health_of(self._transport, server, self._headers) is Health.DYING and now() < until:
            await self.back_off(attempts)

    def deadline_failure(self, attempts: Attempts[Any]) -> FailedRequest:
        return server_failure(f"gave up after {self._deadline_s:g} s: {attempts.trouble}")


class Flights:
    """Counts the tries that run. A try is alone if none runs at its start and none starts before its end."""

    def __init__(self) -> None:
        self._running = 0
        self._started = 0

    def start(self) -> int:
        """A try starts. Returns what `end` needs."""
        self._started += 1
        self._running += 1
        return self._started if self._running == 1 else 0

    def end(self, start: int) -> bool:
        """The try ends. Returns whether it was alone."""
        self._running -= 1
        return start == self._started


WIDTHS = (64, 8, 1)


class CrashIsolation:
    """Gives turns by the number of interruptions. The suspects with the highest number go first, in groups of the
    largest of WIDTHS that is smaller than the number of these suspects. All other suspects wait."""

    def __init__(self) -> None:
        self._present: Counter[int] = Counter()
        self._waiting: list[tuple[int, int, asyncio.Future[bool]]] = []
        """A heap: minus the number of interruptions, the order of arrival, the future that gives the turn."""
        self._arrivals = itertools.count()
        self._running = 0
        self._running_interruptions = 0
        """The number of interruptions of the suspects that are being sent."""

    def add(self, interruptions: int) -> None:
        """Count one more suspect with this number of interruptions. It will ask for a turn."""
        self._present[interruptions] += 1

    def remove(self, interruptions: int) -> None:
        """A suspect with this number of interruptions has ended, or was interrupted once more."""
        self._present[interruptions] -= 1

    async def wait_turn(self, interruptions: int) -> bool:
        """Wait until the suspect may be sent. Returns whether it is the only suspect that is sent. The caller must call
        `end_turn` afterwards."""
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-interruptions, next(self._arrivals), admitted))
        self._admit()
        try:
            return await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # the turn was given at the same moment
                self._running -= 1
            self._admit()
            raise

    def end_turn(self) -> None:
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            interruptions = -self._waiting[0][0]
            width = self._width(interruptions)
            if self._running and (interruptions != self._running_interruptions or self._running >= width):
                return
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.cancelled():
                self._running += 1
                self._running_interruptions = interruptions
                admitted.set_result(width == 1)

    def _width(self, interruptions: int) -> int:
        return next((width for width in WIDTHS if width < self._present[interruptions]), 1)


class StaleWeightsRetry:
    """`counts` has one counter per kind of event. `current_weights` is None for a server whose weights are never
    replaced: none of its answers is compared."""

    def __init__(self, current_weights: CurrentWeightsCheck | None, counts: Counter[str]) -> None:
        self._current_weights = current_weights
        self._counts = counts

    async def why_again(self, wanted: WeightsRef, other: OtherWeights) -> tuple[str, SampleWait]:
        """Why the request is sent again, and what it waits for: the server may have been started again, and gets the
        current weights soon. Raises FailedRequest if `wanted` are not current any more, or the server does not tell
        which weights it used."""
        assert self._current_weights is not None
        try:
            replaced = await self._current_weights.replaced(wanted)
        except DatabaseError as away:
            return f"{other}, and which weights are current is not known: {reason(away)}", SampleWait.AWAY
        if replaced is not None:
            self._counts["replaced_weights"] += 1
            raise FailedRequest(replaced, ErrorCategory.USER)
        if not other.versions:
            self._counts["malformed"] += 1
            raise server_failure(str(other))
        self._counts["other_weights"] += 1
        return f"the inference server does not have the current weights yet: {other}", SampleWait.LOADING
