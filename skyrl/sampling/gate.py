"""The one gate to the inference server: admission, quota, the tenant's turn in vLLM's order, and usage.

A request passes it in two steps. `enter` counts it among those that wait, and `Entry.charge` takes its tokens; then its
row is written, or its pictures are read. `turn` waits until it may be sent, and counts at its end what it has used.
Samples, OpenAI requests, agents' turns and the engine's own samples all take this way.

`Admission` bounds the samples that wait, for all tenants together and for each tenant. `FairOrder` is start-time fair
queueing. Its time is virtual: it counts the tokens that a tenant with waiting samples has been given. The samples of a
tenant take up intervals of this time, one after another. The sample with the lowest priority number is sent next
(`slots`), and vLLM runs it next.

Knows tenants, numbers of tokens, and the names of servers that have answered; does not know what a request asks for,
nor how it is sent.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from skyrl.base.types.weights import AdapterVersion, BaseWeights, WeightsRef
from skyrl.base.wire.errors import OverQuota, RequestError
from skyrl.inference.vllm_plugin.protocol import TENANT_TAGS
from skyrl.sampling.metrics import Ages, Refusal, RefusalMetrics, SampleMetrics, Used
from skyrl.sampling.quota_account import Ticket
from skyrl.sampling.quotas import Quotas
from skyrl.sampling.slots import Sent, Slot, Slots
from skyrl.storage.db.run_steps import Tenanted
from skyrl.storage.db.usage import RunSamples, UsageKey, sample_amounts
from skyrl.storage.shares import is_over


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
            full = is_over(held.requests, self._max_requests - self.requests)
            if full or is_over(held.bytes, self._max_bytes - self.bytes):
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
"""Averages that are kept."""


RECENT = 1_000
"""Every so many answers, servers that have given none of them are forgotten: they may be idle or gone."""


class Work(Sent, Protocol):
    """What the cost of a sample is estimated from."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...


@dataclass(slots=True)
class _Tenant:
    """A tenant with samples in flight: their number, and the end of the last sample's interval."""

    in_flight: int = 0
    end: int = 0


# Every sample makes one. As a frozen dataclass that would take three times as long.
class Place(msgspec.Struct, frozen=True):
    """The start of a sample's interval, its priority for vLLM (lower numbers run earlier), and the expected length of
    its sequences in tokens, which is the average of their `kind`.

    The priority is the middle of the interval, because all sequences of a sample (up to thousands) share one priority.
    """

    tenant: str
    start: int
    priority: int
    length: float
    kind: tuple[str, int]


class FairOrder:
    """Gives samples their places. A tenant without samples in flight starts at the current time. So it gets no credit
    for idle time, and pays nothing for tokens that it got while it was alone.

    The cost of a sample is estimated from the average length of its tenant's sequences of its kind. Estimated from
    `max_tokens`, a tenant would pay for tokens that are never sampled.

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
        self._lengths: dict[tuple[str, int], float] = {}
        """By tenant, and about how large `max_tokens` was: evaluations of a few tokens say nothing about rollouts."""

    def enter(self, tenant: str, job: Work) -> Place:
        """The place of a sample that is sent now. The caller must call `leave` when the sample has ended."""
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant()
        kind = tenant, (job.max_tokens or 0).bit_length()
        length = self._lengths.get(kind, FIRST_LENGTH)
        if job.max_tokens is not None and job.max_tokens < length:
            length = job.max_tokens
        cost = job.prompt_tokens + int(job.num_samples * length)
        start = max(self.now, state.end)
        state.end = start + cost
        state.in_flight += 1
        return Place(tenant, start, start + cost // 2, length, kind)

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
        average = self._lengths.get(place.kind)
        if average is None and len(self._lengths) >= MAX_LENGTHS:
            self._lengths.clear()
        self._lengths[place.kind] = length if average is None else average + WEIGHT * (length - average)

    def _advance(self, start: int, server: str | None) -> None:
        self._answers += 1
        before = self._servers.get(server)
        if before is None or self._answers % RECENT == 0:
            oldest = self._answers - RECENT
            self._servers = {name: known for name, known in self._servers.items() if known[1] > oldest}
        lowest = start if before is None or start > before[0] else before[0]
        self._servers[server] = (lowest, self._answers)
        if len(self._servers) > 1:
            lowest = min([latest for latest, _ in self._servers.values()])
        self.now = lowest if lowest > self._agreed else self._agreed

    def catch_up(self, now: int) -> None:
        """Advance to `now`, the time of another process that sends to the same servers."""
        self._agreed = max(self._agreed, now)
        self.now = max(self.now, now)


class Payer(Protocol):
    """Whose usage a request adds to, and of which weights, such as a sampling session. `session_id` is empty for a
    request without a session."""

    @property
    def tenant(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def base_model(self) -> str: ...
    @property
    def weights(self) -> WeightsRef: ...


class SamplingGate:
    """The gate of one base model. `count` adds amounts to the usage, `runs` counts samples. `order` is None if the
    inference server ignores priorities, `slots` if any number of requests is sent to it. `admission` and `quotas` are
    those of the process; the engine has none, because an API process has let its samples in."""

    def __init__(
        self,
        count: Callable[[Mapping[UsageKey, int]], None],
        metrics: SampleMetrics,
        *,
        runs: RunSamples | None = None,
        order: FairOrder | None = None,
        slots: Slots | None = None,
        admission: Admission | None = None,
        quotas: Quotas | None = None,
        refusals: RefusalMetrics | None = None,
    ) -> None:
        self.count = count
        self.metrics = metrics
        self.runs = runs or RunSamples()
        self.order = order
        self.slots = slots
        self._admission = admission
        self._quotas = quotas
        self._refusals = refusals or RefusalMetrics()
        self.ages = Ages()
        """Of the requests in flight, as the metrics show them."""
        metrics.watch(self.ages)
        if slots is not None:
            metrics.watch_held_back(lambda: slots.waiting)

    def enter(self, tenant: str, size: int) -> Entry:
        """Count a request of `size` bytes. Raises RequestError 429 if too many wait."""
        if self._admission is not None:
            self._admission.enter(tenant, size)
        return Entry(tenant, size, self._admission, self._quotas, self._refusals)

    def enter_again(self, tenant: str, size: int, request_id: str, not_before: float | None) -> Entry:
        """Count a request that another process, or the predecessor of this one, has let in. Never refuses."""
        if self._admission is not None:
            self._admission.add(tenant, size)
        entry = Entry(tenant, size, self._admission, self._quotas, self._refusals)
        if self._quotas is not None and self._quotas.in_use:
            entry.ticket = self._quotas.adopt(tenant, request_id, not_before)
        return entry

    def turn(self, entry: Entry | None, work: Work, payer: Payer) -> Turn:
        """The turn of a request, to be entered once. `entry` is None if the request did not enter here."""
        return Turn(self, None if entry is None else entry.ticket, work, payer)


class Entry(msgspec.Struct, eq=False):
    """A request that was let in, until `leave` or `hand_over`. `ticket` is its part of the tenant's quota, None without
    a quota. `not_before`: when it may be sent, in seconds since the epoch; None: at once."""

    _tenant: str
    _size: int
    _admission: Admission | None
    _quotas: Quotas | None
    _refusals: RefusalMetrics
    ticket: Ticket | None = None
    not_before: float | None = None

    def charge(self, request_id: str, tokens: int) -> None:
        """Count the request in its tenant's quota, with at most so many tokens. Raises OverQuota."""
        if self._quotas is None or not self._quotas.in_use:
            return
        try:
            self.ticket = self._quotas.admit(self._tenant, request_id, tokens)
        except OverQuota:
            self._refusals.refused("quota")
            raise
        if self.ticket is not None:
            self.not_before = self.ticket.not_before

    def recorded_as(self, request_id: str) -> None:
        """An earlier try of the request may have been stored under another id."""
        if self.ticket is not None:
            self.ticket.request_id = request_id

    def hand_over(self) -> None:
        """The engine runs the request. It stays in its tenant's quota until it has ended, and waits here no more."""
        if self.ticket is not None:
            self.ticket.hand_over()
            self.ticket = None
        self.leave()

    def leave(self) -> None:
        """The request has ended, or was not recorded. A second call does nothing."""
        if self._admission is not None:
            self._admission.leave(self._tenant, self._size)
            self._admission = None
        if self.ticket is not None:
            self.ticket.end()


# Every sample makes one. A generator with a decorator would take four times as long.
class Turn(msgspec.Struct, eq=False):
    """The time in which a request is sent and answered (`async with`). To enter it raises FailedRequest if the
    inference server answers nothing while the request waits to be sent.

    Set `used` as soon as it is known what the request has used, and `server` to the replica that a router has named.
    `priority` is for vLLM: lower numbers run earlier, and the number modulo TENANT_TAGS tells tenants apart. None if
    the inference server ignores priorities. `waited_s`: how long the request waited for tokens of its tenant's quota,
    and to be sent. `waits_since`: since when it waits to be sent (`time.perf_counter`); None if it does not.
    """

    _gate: SamplingGate
    _ticket: Ticket | None
    _work: Work
    _payer: Payer
    _place: Place | None = None
    _run: Tenanted | None = None
    _slot: Slot | None = None
    """At the inference server."""
    priority: int | None = None
    waited_s: float = 0.0
    waits_since: float | None = None
    used: Used | None = None
    server: str | None = None

    @property
    def has_adapter(self) -> bool:
        return isinstance(self._payer.weights, AdapterVersion)

    async def __aenter__(self) -> Turn:
        if self._ticket is not None and self._ticket.not_before is not None:
            began = time.perf_counter()
            await self._ticket.wait_turn()
            self.waited_s = time.perf_counter() - began
        gate, tenant = self._gate, self._payer.tenant
        if (order := gate.order) is not None:
            place = self._place = order.enter(tenant, self._work)
            self.priority = place.priority * TENANT_TAGS + zlib.crc32(tenant.encode()) % TENANT_TAGS
        self._run = run = _run_of(self._payer)
        if run is not None:
            gate.runs.begin(run, time.perf_counter())
        if (slots := gate.slots) is not None:
            length = 0.0 if self._place is None else self._place.length
            self._slot = slots.take(tenant, self._work, length)
            if self._slot is None:
                await self._wait(slots, length)
        return self

    async def _wait(self, slots: Slots, length: float) -> None:
        self.waits_since = time.perf_counter()
        try:
            self._slot = await slots.wait(self._payer.tenant, self._work, length, self.priority or 0)
        except BaseException:
            await self.__aexit__()
            raise
        finally:
            self.waited_s += time.perf_counter() - self.waits_since
            self.waits_since = None

    async def __aexit__(self, *_: object) -> None:
        gate, used, ticket, payer = self._gate, self.used, self._ticket, self._payer
        if ticket is not None:  # ends before the client gets the answer and sends its next request
            ticket.used = 0 if used is None else used.prompt_tokens + used.sampled_tokens
            ticket.end()
        if gate.slots is not None and self._slot is not None:
            gate.slots.give_back(self._slot, answered=used is not None)
        if gate.order is not None and self._place is not None:
            gate.order.leave(self._place, self._work.num_samples, used, self.server)
        if (run := self._run) is not None:
            counts = (
                (0, 0, 0.0, 0) if used is None else (used.samples, used.truncated, used.surprise, used.surprise_tokens)
            )
            gate.runs.end(run, time.perf_counter(), *counts)
        if used is not None:
            amounts = sample_amounts(
                payer.tenant,
                payer.session_id,
                payer.base_model,
                payer.weights,
                prompt=used.prompt_tokens,
                cached=used.cached_tokens,
                sampled=used.sampled_tokens,
                again=used.computed_again,
            )
            gate.count(amounts)
            gate.metrics.succeeded(used)


def _run_of(payer: Payer) -> Tenanted | None:
    """The model whose weights are sampled from, and by whom; None for the base model."""
    weights = payer.weights
    return None if isinstance(weights, BaseWeights) else (weights.model_id, payer.tenant)
