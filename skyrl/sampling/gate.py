"""The one gate to the inference server: admission, quota, the tenant's turn in vLLM's order, and usage.

A request passes it in two steps. `enter` counts it among those that wait, and `Entry.charge` takes its tokens; then its
row is written, or its pictures are read. `turn` waits until it may be sent, and counts at its end what it has used.
Samples, OpenAI requests, agents' turns and the engine's own samples all take this way. Knows tenants and numbers of
tokens; does not know what a request asks for, nor how it is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from skyrl.base.types.weights import WeightsRef
from skyrl.base.wire.errors import OverQuota
from skyrl.sampling.metrics import Ages, RefusalMetrics, SampleMetrics, Used
from skyrl.sampling.order import Admission, FairOrder, Place, Work
from skyrl.sampling.quota_account import Ticket
from skyrl.sampling.quotas import Quotas
from skyrl.storage.db.usage import UsageKey, sample_amounts


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
    """The gate of one base model. `count` adds amounts to the usage. `order` is None if the inference server ignores
    priorities. `admission` and `quotas` are those of the process; the engine has none, because an API process has let
    its samples in."""

    def __init__(
        self,
        count: Callable[[Mapping[UsageKey, int]], None],
        metrics: SampleMetrics,
        *,
        order: FairOrder | None = None,
        admission: Admission | None = None,
        quotas: Quotas | None = None,
        refusals: RefusalMetrics | None = None,
    ) -> None:
        self.count = count
        self.metrics = metrics
        self.order = order
        self._admission = admission
        self._quotas = quotas
        self._refusals = refusals or RefusalMetrics()
        self.ages = Ages()
        """Of the requests in flight, as the metrics show them."""
        metrics.watch(self.ages)

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
    """The time in which a request is sent and answered (`async with`).

    Set `used` as soon as it is known what the request has used, and `server` to the replica that a router has named.
    `priority` is for vLLM: lower numbers run earlier; None if the inference server ignores priorities. `waited_s`: how
    long the request waited for tokens of its tenant's quota.
    """

    _gate: SamplingGate
    _ticket: Ticket | None
    _work: Work
    _payer: Payer
    _place: Place | None = None
    priority: int | None = None
    waited_s: float = 0.0
    used: Used | None = None
    server: str | None = None

    async def __aenter__(self) -> Turn:
        if self._ticket is not None and self._ticket.not_before is not None:
            began = time.perf_counter()
            await self._ticket.wait_turn()
            self.waited_s = time.perf_counter() - began
        if (order := self._gate.order) is not None:
            place = self._place = order.enter(self._payer.tenant, self._work)
            self.priority = place.priority
        return self

    async def __aexit__(self, *_: object) -> None:
        gate, used, ticket = self._gate, self.used, self._ticket
        if ticket is not None:  # ends before the client gets the answer and sends its next request
            ticket.used = 0 if used is None else used.prompt_tokens + used.sampled_tokens
            ticket.end()
        if gate.order is not None and self._place is not None:
            gate.order.leave(self._place, self._work.num_samples, used, self.server)
        if used is not None:
            payer = self._payer
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
