"""The samples that an API process forwards: one task for each, from its turn under the quota to its stored outcome.

Knows jobs and outcomes. Does not know how a sample is requested, checked or recorded; `service` does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.runtime.metrics.tallies import outcome_label
from skyrl.runtime.tracing import current_trace
from skyrl.sampling.metrics import Ages, SampleMetrics
from skyrl.server.futures.store import FutureStore
from skyrl.server.quotas.account import Ticket
from skyrl.server.sampling.admission import Admission
from skyrl.server.sampling.client import ForwardingClient
from skyrl.server.sampling.completion import SampleAnswer
from skyrl.server.sampling.fair_order import FairOrder
from skyrl.server.sampling.job import SampleJob
from skyrl.server.sampling.progress import SampleProgress
from skyrl.server.sampling.sampler_job import usage_of
from skyrl.storage.db.adapter_versions import dropped_sentence
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.samplers import Sampler, Samplers
from skyrl.storage.db.usage import UsageCounter

logger = logging.getLogger(__name__)


class ForwardedSamples:
    """Owns the tasks, by request id. `order` is None if the inference server ignores priorities. `client` is None if
    the engine samples; then nobody calls `start`."""

    def __init__(
        self,
        client: ForwardingClient | None,
        futures: FutureStore,
        samplers: Samplers,
        admission: Admission,
        order: FairOrder | None,
        usage: UsageCounter,
        metrics: SampleMetrics,
    ) -> None:
        self._client = client
        self._futures = futures
        self._samplers = samplers
        self._admission = admission
        self._order = order
        self._usage = usage
        self._metrics = metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ages = Ages()
        self.completed = 0
        """Samples whose inference server returned a result."""
        metrics.watch(self._ages)
        metrics.watch_events(lambda: {} if client is None else client.counts)

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def progress(self, request_id: str) -> SampleProgress | None:
        """Where a sample stands after its turn under the quota has come; None for others."""
        return None if self._client is None else self._client.progress(request_id)

    def adapters_in_flight(self) -> int:
        return 0 if self._client is None else self._client.adapters_in_flight()

    def start(self, job: SampleJob, sampler: Sampler, size: int, ticket: Ticket | None) -> None:
        """Forward a sample that is recorded and counted in the admission with `size` bytes."""
        began = time.perf_counter()
        task = asyncio.create_task(self._forward(job, sampler, ticket, began))
        self._tasks[job.request_id] = task
        self._ages.begin(job.request_id, began)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.pop(job.request_id, None)
            self._ages.end(job.request_id)
            if task.cancelled():
                self._metrics.cancelled()
            self._admission.leave(sampler.tenant, size)
            self._samplers.note_use(sampler)  # again: the sample may have taken hours
            if ticket is not None:  # the ticket is still open if the task was cancelled
                ticket.end()

        task.add_done_callback(end)

    async def _forward(self, job: SampleJob, sampler: Sampler, ticket: Ticket | None, began: float) -> None:
        assert self._client is not None
        turn, upstream_s = began, 0.0
        try:
            if ticket is not None:
                await ticket.wait_turn()
                turn = time.perf_counter()
            answer = await self._sample(self._client, job, sampler.tenant)
            outcome = Outcome(answer.body, "proto:sample")
            self._usage.count(usage_of(answer, sampler))
            used = answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens
            self._metrics.succeeded(*used, again=answer.computed_again)
            if answer.changed_weights:
                self._client.counts["changed_weights"] += 1
                logger.info("request %s was sampled by several versions of the weights", job.request_id)
            upstream_s = answer.upstream_s
            self.completed += 1
            if ticket is not None:
                ticket.used = answer.prompt_tokens + answer.sampled_tokens
        except FailedRequest as error:
            outcome = await self._failure(error, sampler)
        except Exception:  # the exception's text may hold addresses and names that only the operator may see
            logger.exception("forwarding request %s failed", job.request_id)
            message = f"the server could not compute this sample; its log says why, under request {job.request_id}"
            outcome = Outcome(error=message, error_category=ErrorCategory.SERVER)
        if ticket is not None:
            ticket.end()  # before the client gets the outcome and sends its next sample
        span = None if (trace := current_trace.get()) is None else trace.child("settle")
        await self._futures.settle(job.request_id, outcome)
        if span is not None:
            span.end({"skyrl.request_id": job.request_id}, outcome.error)
        now = time.perf_counter()
        ended = outcome_label(outcome.error, outcome.error_category)
        self._metrics.ended(ended, now - began, now - turn - upstream_s)

    async def _sample(self, client: ForwardingClient, job: SampleJob, tenant: str) -> SampleAnswer:
        if self._order is None:
            return await client.sample(job)
        place, answer = self._order.enter(tenant, job), None
        try:
            answer = await client.sample(job, place.priority)
            return answer
        finally:
            self._order.leave(place, job.num_samples, answer, None if answer is None else answer.server)

    async def _failure(self, error: FailedRequest, sampler: Sampler) -> Outcome:
        """The outcome of a failed sample. If the adapter was dropped, the drop is the cause, not the inference server.
        This process may not know of the drop yet, because it was stopped at that time."""
        if error.category is ErrorCategory.SERVER and isinstance(sampler.weights, AdapterVersion):
            with contextlib.suppress(DatabaseError):  # without the database this process cannot know of a drop
                if await self._samplers.is_dropped(sampler):
                    return Outcome(error=dropped_sentence(sampler.id), error_category=ErrorCategory.USER)
        return Outcome(error=error.message, error_category=error.category)

    def cancel(self, request_ids: list[str]) -> None:
        """Stop forwarding these samples. The connection is closed, so vLLM stops, too."""
        for request_id in request_ids:
            if (task := self._tasks.get(request_id)) is not None:
                task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Wait until all samples have ended, then cancel those that still run after `grace_s`. Cancelled samples stay
        pending, and the next start of this process forwards them again."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=grace_s)
        unfinished = list(self._tasks.values())
        for task in unfinished:
            task.cancel()
        if unfinished:
            logger.info("%d samples in flight are left for the next start", len(unfinished))
            await asyncio.gather(*unfinished, return_exceptions=True)
