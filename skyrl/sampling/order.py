"""How many samples may wait in this process, and in which order vLLM runs the samples of several tenants.

`Admission` bounds the samples that wait, for all tenants together and for each tenant. `FairOrder` is start-time fair
queueing. Its time is virtual: it counts the tokens that a tenant with waiting samples has been given. The samples of a
tenant take up intervals of this time, one after another. vLLM runs the sample with the lowest priority number next. An
OpenAI request is a sample, too. Knows tenants, numbers of tokens, and the names of servers that have answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.sampling.metrics import Refusal, RefusalMetrics, Used

SHARE = 8
"""A tenant may hold up to SHARE times the capacity that is still free. One tenant alone gets 8/9 of the whole, two
tenants get 8/17 each. So there is always room for a tenant that holds little."""


@dataclass(slots=True)
class _TenantCount:
    requests: int = 0
    bytes: int = 0


class Admission:
    """Counts waiting samples in requests and bytes. A sample above the bound is refused and not recorded."""

    def __init__(self, max_requests: int, max_bytes: int, metrics: RefusalMetrics | None = None) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._metrics = metrics or RefusalMetrics()
        self.requests = 0
        self.bytes = 0
        self._tenants: dict[str, _TenantCount] = {}

    def enter(self, tenant: str, size: int) -> None:
        """Count a sample. Raises RequestError 429 if the bound is reached, or the share of the tenant."""
        full = self.requests >= self._max_requests
        if full or self.bytes + size > max(self._max_bytes, size):
            raise self._refusal(full, f"{self.requests} samples ({self.bytes} bytes) are waiting")
        held = self._tenants.get(tenant)
        if held is not None:
            full = held.requests >= SHARE * (self._max_requests - self.requests)
            if full or held.bytes >= SHARE * (self._max_bytes - self.bytes):
                waiting = f"{held.requests} samples ({held.bytes} bytes) of yours are waiting, which is your share"
                raise self._refusal(full, waiting)
        self.add(tenant, size)

    def add(self, tenant: str, size: int) -> None:
        """Count a sample that this process or another has admitted before. Never refuses."""
        held = self._tenants.setdefault(tenant, _TenantCount())
        held.requests += 1
        held.bytes += size
        self.requests += 1
        self.bytes += size

    def leave(self, tenant: str, size: int) -> None:
        held = self._tenants[tenant]
        held.requests -= 1
        held.bytes -= size
        if not held.requests:
            del self._tenants[tenant]
        self.requests -= 1
        self.bytes -= size

    def _refusal(self, full: bool, waiting: str) -> RequestError:
        """`full`: the number of samples is the reason; otherwise their bytes are."""
        reason: Refusal = "full" if full else "bytes"
        self._metrics.refused(reason)
        return RequestError(f"{waiting}; try again later", status=429, retry_after_s=1)


FIRST_LENGTH = 256.0
"""The expected length in tokens of a tenant's first sequence, unless the sample's `max_tokens` is lower."""
WEIGHT = 1 / 16
"""The weight of the newest sample in the moving average of its tenant's sequence lengths."""
MAX_LENGTHS = 10_000
"""Tenants whose averages are kept."""


RECENT = 1_000
"""Every so many answers, servers that have given none of them are forgotten: they may be idle or gone."""


class Work(Protocol):
    """What the cost of a sample is estimated from."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...


@dataclass(slots=True)
class _Tenant:
    """A tenant with samples in flight: their number, and the end of the last sample's interval."""

    in_flight: int = 0
    end: int = 0


# Every sample makes one. As a frozen dataclass that would take three times as long.
class Place(msgspec.Struct, frozen=True):
    """The start of a sample's interval, and its priority for vLLM: lower numbers run earlier.

    The priority is the middle of the interval, because all sequences of a sample (up to thousands) share one priority.
    """

    tenant: str
    start: int
    priority: int


class FairOrder:
    """Gives samples their places. A tenant without samples in flight starts at the current time. So it gets no credit
    for idle time, and pays nothing for tokens that it got while it was alone.

    The cost of a sample is estimated from the average length of its tenant's sequences. Estimated from `max_tokens`, a
    tenant would pay for tokens that are never sampled.

    Behind a router each server has a queue of its own, and a server that has less to do gets further. The current time
    is that of the server that is furthest behind. With the time of another one, a new tenant's samples would run after
    all that waits there.
    """

    def __init__(self) -> None:
        self.now = 0
        """The current virtual time: of the latest starts of samples that each server has answered, the lowest."""
        self._agreed = 0
        self._answers = 0
        self._servers: dict[str | None, tuple[int, int]] = {}
        """By server: the latest start of a sample that it has answered, and the number of its latest answer."""
        self._tenants: dict[str, _Tenant] = {}
        self._lengths: dict[str, float] = {}

    def enter(self, tenant: str, job: Work) -> Place:
        """The place of a sample that is sent now. The caller must call `leave` when the sample has ended."""
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant()
        length = self._lengths.get(tenant, FIRST_LENGTH)
        if job.max_tokens is not None and job.max_tokens < length:
            length = job.max_tokens
        cost = job.prompt_tokens + int(job.num_samples * length)
        start = max(self.now, state.end)
        state.end = start + cost
        state.in_flight += 1
        return Place(tenant, start, start + cost // 2)

    def leave(self, place: Place, sequences: int, used: Used | None, server: str | None = None) -> None:
        """The sample has ended. `used` is None if it did not run, or if that is unknown. `server` is the name of the
        server behind a router that has answered; None without a router."""
        state = self._tenants[place.tenant]
        state.in_flight -= 1
        if not state.in_flight:
            del self._tenants[place.tenant]
        if used is None:
            return
        self._advance(place.start, server)
        length = used.sampled_tokens / sequences
        average = self._lengths.get(place.tenant)
        if average is None and len(self._lengths) >= MAX_LENGTHS:
            self._lengths.clear()
        self._lengths[place.tenant] = length if average is None else average + WEIGHT * (length - average)

    def _advance(self, start: int, server: str | None) -> None:
        self._answers += 1
        before = self._servers.get(server)
        if before is None or self._answers % RECENT == 0:
            oldest = self._answers - RECENT
            self._servers = {name: known for name, known in self._servers.items() if known[1] > oldest}
        self._servers[server] = (start if before is None or start > before[0] else before[0], self._answers)
        lowest = min([latest for latest, _ in self._servers.values()])
        self.now = lowest if lowest > self._agreed else self._agreed

    def catch_up(self, now: int) -> None:
        """Advance to `now`, the time of another process that sends to the same servers."""
        self._agreed = max(self._agreed, now)
        self.now = max(self.now, now)
