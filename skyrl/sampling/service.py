"""Sample requests in the API process: find the sampling session, check, record, and start the sample.

A forwarded sample becomes an EXTERNAL future, and a task that this service owns. A colocated sample becomes a SAMPLE
future for the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from skyrl.db.adapter_versions import dropped_sentence
from skyrl.db.api_processes import PendingSample
from skyrl.db.faults import DatabaseError
from skyrl.db.futures import Outcome
from skyrl.db.samplers import Sampler, Samplers
from skyrl.db.sessions import Sessions
from skyrl.db.usage import UsageCounter, UsageKey, sample_amounts
from skyrl.futures.store import FutureStore
from skyrl.notify.doorbell import Doorbell
from skyrl.quotas.account import Ticket
from skyrl.quotas.tenants import Quotas
from skyrl.sampling.admission import Admission
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.cut import CutNotes, cut_to
from skyrl.sampling.fair_order import FairOrder
from skyrl.sampling.guards import FeatureGuard
from skyrl.sampling.job import ContextLimits, SampleJob, make_job
from skyrl.types.ids import new_request_id, sample_sequence_ids
from skyrl.types.kinds import SAMPLES, Kind
from skyrl.types.requests import NewRequest
from skyrl.types.weights import AdapterVersion, BaseWeights, FullWeights, WeightsRef
from skyrl.wire.decoding import decode_json
from skyrl.wire.errors import ErrorCategory, FailedRequest, NotFound, RequestError
from skyrl.wire.sample_request import SampleRequest

logger = logging.getLogger(__name__)

CANCELLED = Outcome(error="cancelled by the client", error_category=ErrorCategory.USER)


@dataclass(frozen=True, slots=True)
class Promise:
    """What asample answers at once. `max_tokens` is the bound to which it was cut; None when it was not cut. `note`
    says so in words, to the first sample of a sampling session that is cut."""

    request_id: str
    sample_sequence_ids: list[str]
    max_tokens: int | None = None
    note: str | None = None


class SampleService:
    """Takes `asample` bodies. With a client it forwards samples. Without one the engine samples, in its own loop."""

    def __init__(
        self,
        futures: FutureStore,
        samplers: Samplers,
        sessions: Sessions,
        *,
        client: ForwardingClient | None,
        engine: Doorbell | None,
        limits: Callable[[], ContextLimits],
        admission: Admission,
        order: FairOrder | None,
        base_name: str,
        guard: FeatureGuard,
        usage: UsageCounter,
        quotas: Quotas,
    ) -> None:
        self._futures = futures
        self._samplers = samplers
        self._sessions = sessions
        self._client = client
        self._engine = engine
        self._limits = limits
        self._admission = admission
        self.order = order
        """None where the inference server does not go by priorities."""
        self._base_name = base_name
        self._guard = guard
        self._usage = usage
        self._quotas = quotas
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        self.cuts = CutNotes()
        self.forwarded = 0
        self.to_engine = 0

    async def submit(self, body: bytes, tenant: str) -> Promise:
        """Record one sample request and start it.

        Raises RequestError (400, 404, 429, 503); then nothing was recorded.
        """
        if self._stopping:
            raise RequestError("the server is stopping; send the sample again", status=503, retry_after_s=1)
        request = decode_json(SampleRequest, body)
        sampler = await self._resolve(request, tenant)
        request_id = new_request_id()
        job = job_for(request, request_id, sampler, self._limits(), self._base_name)
        self._guard.check(request, sampler)
        if request.seq_id is not None and not 0 <= request.seq_id < 2**63:
            raise RequestError("must be in [0, 2**63)", field="seq_id")
        self._admission.enter(tenant, len(body))
        started = new = False
        ticket: Ticket | None = None
        try:
            if self._quotas.any:
                ticket = self._quotas.admit(tenant, request_id, job.most_tokens)
            request_id, new = await self._futures.record(
                NewRequest(
                    kind=Kind.EXTERNAL if self._client is not None else Kind.SAMPLE,
                    tenant=tenant,
                    session_id=sampler.session_id,
                    body=body,
                    sampling_session_id=sampler.id,
                    sample_seq_id=request.seq_id,
                    id=request_id,
                    not_before=None if ticket is None else ticket.not_before,
                )
            )
            self._samplers.note_use(sampler)
            if new:
                if ticket is not None:
                    ticket.request_id = request_id
                if self._client is not None:
                    if request_id != job.request_id:  # an earlier try was stored under another id
                        job = replace(job, request_id=request_id)
                    self._start(job, sampler, len(body), ticket)
                    started = True
                elif self._engine is not None:
                    self.to_engine += 1
                    self._engine.ring()
                    if ticket is not None:
                        ticket.hand_over()
        finally:
            if not started:
                self._admission.leave(tenant, len(body))
            if ticket is not None and not new:
                ticket.end()
        note = self.cuts.note(request, job, sampler.id)
        return Promise(request_id, sample_sequence_ids(request_id, request.num_samples), cut_to(request, job), note)

    async def _resolve(self, request: SampleRequest, tenant: str) -> Sampler:
        if request.sampling_session_id is None:
            raise RequestError("is missing: create a sampling session first", field="sampling_session_id")
        return await self.open_sampler(request.sampling_session_id, tenant)

    async def open_sampler(self, sampling_session_id: str, tenant: str, field: str = "sampling_session_id") -> Sampler:
        """The tenant's sampling session, if its session is active. Raises NotFound naming `field`."""
        sampler = self._samplers.cached(sampling_session_id, tenant)
        if sampler is None:
            sampler = await self._samplers.find(sampling_session_id, tenant)
        if sampler is None:
            raise NotFound(f"no sampling session {sampling_session_id!r}", field=field)
        # The engine closes the row later. The answer is not 410: on 410 the SDK sends the sample again for ever.
        session = await self._sessions.find(sampler.session_id, tenant)
        if session is None or session.status != "active":
            raise NotFound(f"the session of {sampling_session_id!r} has ended", field=field)
        return sampler

    def _start(self, job: SampleJob, sampler: Sampler, size: int, ticket: Ticket | None) -> None:
        task = asyncio.create_task(self._forward(job, sampler, ticket))
        self._tasks[job.request_id] = task

        def done(_: asyncio.Task[None]) -> None:
            self._tasks.pop(job.request_id, None)
            self._admission.leave(sampler.tenant, size)
            self._samplers.note_use(sampler)  # its last use is now: the sample may have taken hours
            if ticket is not None:  # it was cancelled
                ticket.end()

        task.add_done_callback(done)

    async def _forward(self, job: SampleJob, sampler: Sampler, ticket: Ticket | None) -> None:
        assert self._client is not None
        try:
            if ticket is not None:
                await ticket.turn()
            answer = await self._sample(self._client, job, sampler.tenant)
            outcome = Outcome(answer.body, "proto:sample")
            self._usage.count(usage_of(answer, sampler))
            self.forwarded += 1
            if ticket is not None:
                ticket.used = answer.prompt_tokens + answer.sampled_tokens
        except FailedRequest as error:
            outcome = await self._failed(error, sampler)
        except Exception:  # its text may hold addresses and names that only the operator may see
            logger.exception("forwarding request %s failed", job.request_id)
            told = f"the server could not compute this sample; its log says why, under request {job.request_id}"
            outcome = Outcome(error=told, error_category=ErrorCategory.SERVER)
        if ticket is not None:
            ticket.end()  # before its client gets the outcome and sends its next sample
        await self._futures.settle(job.request_id, outcome)

    async def _failed(self, error: FailedRequest, sampler: Sampler) -> Outcome:
        """The outcome of a sample that failed. When its adapter has been dropped, that is the cause, not the inference
        server. This process may have been stopped meanwhile, and may not have learned of the drop."""
        if error.category is ErrorCategory.SERVER and isinstance(sampler.weights, AdapterVersion):
            with contextlib.suppress(DatabaseError):  # then this process cannot tell
                if await self._samplers.is_dropped(sampler):
                    return Outcome(error=dropped_sentence(sampler.id), error_category=ErrorCategory.USER)
        return Outcome(error=error.message, error_category=error.category)

    async def _sample(self, client: ForwardingClient, job: SampleJob, tenant: str) -> SampleAnswer:
        if self.order is None:
            return await client.sample(job)
        place, answer = self.order.enter(tenant, job), None
        try:
            answer = await client.sample(job, place.priority)
            return answer
        finally:
            self.order.leave(place, job.num_samples, answer)

    async def adopt(self, sample: PendingSample) -> None:
        """Forward a pending sample that another API process, or an earlier one, has left."""
        if sample.sampling_session_id is not None and sample.sample_seq_id is not None:
            key = ("sample", sample.sampling_session_id, sample.sample_seq_id)
        else:
            key = None
        if not self._futures.adopt(sample.id, Kind.EXTERNAL, sample.tenant, sample.session_id, sample.digest, key):
            return
        try:
            request = decode_json(SampleRequest, sample.body)
            sampler = await self._resolve(request, sample.tenant)
            job = job_for(request, sample.id, sampler, self._limits(), self._base_name)
        except RequestError as error:  # the session has ended, or the server has another base model now
            await self._futures.settle(sample.id, Outcome(error=error.message, error_category=ErrorCategory.USER))
            return
        self._admission.add(sample.tenant, len(sample.body))
        ticket = self._quotas.adopt(sample.tenant, sample.id, sample.not_before) if self._quotas.any else None
        self._start(job, sampler, len(sample.body), ticket)

    def cancel(self, request_ids: list[str]) -> None:
        """Stop forwarding these samples. Closing the connection makes vLLM stop, too."""
        for request_id in request_ids:
            if (task := self._tasks.get(request_id)) is not None:
                task.cancel()

    async def cancel_future(self, request_id: str, tenant: str) -> None:
        """End a pending sample as cancelled. A sample that has ended stays as it is.

        Raises NotFound, and RequestError for a request that is no sample: a training command cannot be cancelled.
        """
        try:
            kind = await self._futures.kind_of(request_id, tenant)
        except KeyError as error:
            raise NotFound(f"no request {request_id!r}", field="request_id") from error
        if kind not in SAMPLES:
            raise RequestError(f"{request_id!r} is no sample, and only samples can be cancelled", field="request_id")
        if self._futures.is_pending(request_id):  # otherwise its result is being written
            self.cancel([request_id])
        await self._futures.end(request_id, CANCELLED)

    def forwards(self, request_id: str) -> bool:
        """Whether this process forwards a sample with this id now."""
        return request_id in self._tasks

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def refuse_new(self) -> None:
        """Answer samples with 503 from now on: the server is stopping."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def drain(self, grace_s: float) -> None:
        """Let samples in flight end. Those that run after `grace_s` stay pending, and the next start forwards them."""
        self.cancel(list(self._quotas.waiting))  # these have not been sent yet
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=grace_s)
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        if left:
            logger.info("%d samples in flight are left for the next start", len(left))
            await asyncio.gather(*left, return_exceptions=True)


def usage_of(answer: SampleAnswer, sampler: Sampler) -> dict[UsageKey, int]:
    """What a sample counts as in its tenant's usage."""
    return sample_amounts(
        sampler.tenant,
        sampler.session_id,
        sampler.base_model,
        prompt=answer.prompt_tokens,
        cached=answer.cached_tokens,
        sampled=answer.sampled_tokens,
    )


def job_for(
    request: SampleRequest, request_id: str, sampler: Sampler, limits: ContextLimits, base_name: str
) -> SampleJob:
    """The job that samples from the weights of a sampling session. `base_name` is the inference servers' name for the
    base model. Raises RequestError naming the field."""
    return make_job(
        request,
        request_id=request_id,
        session_key=f"{sampler.id}:{request.seq_id}",
        model=served_name(sampler.weights, base_name, "sampling_session_id"),
        weights=sampler.weights,
        limits=limits,
    )


def served_name(weights: WeightsRef, base_name: str, field: str) -> str:
    """The name by which inference servers know these weights. Raises RequestError naming `field` for weights that this
    server cannot sample from."""
    match weights:
        case BaseWeights():
            return base_name
        case AdapterVersion(name):
            return name
        case FullWeights(version):
            raise RequestError(
                f"version {version!r} of the full weights cannot be sampled from: this server samples from the base "
                "model and from adapters",
                field=field,
            )
