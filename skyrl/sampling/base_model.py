"""Sampling from one base model: what its samples go through, from a request and its sampling session to the outcome.

`BaseModelSampling` holds the parts of one base model, and `BaseModels` finds the one that a sample belongs to.
`job_for` and `served_name` say what follows from the sampling session of a request: the job, and the name of the
weights. The engine, which runs samples itself in `colocate_all`, uses them, too.
`ForwardedSamples` has one task for each sample that an API process forwards, from its turn at the gate to its stored
outcome. Does not know how a sample is requested, checked or recorded; `service` does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skyrl.base.config.several import ByName
from skyrl.base.pictures.picture import Pictures
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights, WeightsRef, served_version
from skyrl.base.wire.errors import ErrorCategory, FailedRequest, RequestError
from skyrl.base.wire.sample_request import SampleRequest
from skyrl.runtime.metrics.tallies import outcome_label
from skyrl.runtime.tracing import current_trace
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.gate import Entry, SamplingGate, Turn
from skyrl.sampling.job import FeatureGuard, SampleJob, make_job
from skyrl.sampling.pictures import PictureIngress
from skyrl.sampling.retries import SampleProgress, SampleWait
from skyrl.sampling.servers import CurrentWeightsCheck
from skyrl.storage.db.adapter_versions import dropped_sentence
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.samplers import Sampler, Samplers
from skyrl.storage.futures.store import FutureStore


def job_for(
    request: SampleRequest,
    request_id: str,
    sampler: Sampler,
    limits: ContextLimits,
    base_name: str,
    *,
    full_finetuning: bool = False,
    pictures: Pictures | None = None,
) -> SampleJob:
    """The job that samples from the weights of a sampling session. `base_name` is the inference servers' name for the
    base model. Raises RequestError naming the field."""
    model = served_name(sampler.weights, base_name, "sampling_session_id", full_finetuning=full_finetuning)
    return make_job(
        request,
        request_id=request_id,
        session_key=f"{sampler.id}:{request.seq_id}",
        model=model,
        weights=sampler.weights,
        limits=limits,
        version=served_version(sampler.weights) if full_finetuning else None,
        pictures=pictures,
    )


def served_name(weights: WeightsRef, base_name: str, field: str, *, full_finetuning: bool = False) -> str:
    """The name by which inference servers know these weights: full weights take the place of the base model. Raises
    RequestError naming `field` for weights that this server cannot sample from."""
    match weights:
        case BaseWeights():
            return base_name
        case AdapterVersion(name):
            if not full_finetuning:
                return name
            refused = f"adapter {name!r} cannot be sampled from: this server trains whole models, and has no adapters"
        case FullWeights(version):
            if full_finetuning:
                return base_name
            refused = (
                f"version {version!r} of the full weights cannot be sampled from: this server samples from the base "
                "model and from adapters"
            )
    raise RequestError(refused, field=field)


logger = logging.getLogger(__name__)


class ForwardedSamples:
    """Owns the tasks, by request id, each with its turn at the gate. `client` is None if the engine samples; then
    nobody calls `start`."""

    def __init__(
        self,
        client: ForwardingClient | None,
        futures: FutureStore,
        samplers: Samplers,
        gate: SamplingGate,
    ) -> None:
        self._client = client
        self._futures = futures
        self._samplers = samplers
        self._gate = gate
        self._running: dict[str, tuple[asyncio.Task[None], Turn]] = {}
        self.completed = 0
        """Samples whose inference server returned a result."""
        gate.metrics.watch_events(lambda: {} if client is None else client.counts)

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def progress(self, request_id: str) -> SampleProgress | None:
        """Where a sample stands that its quota does not hold back; None for others."""
        if self._client is None or (running := self._running.get(request_id)) is None:
            return None
        _, turn = running
        if turn.waits_since is not None:
            return SampleProgress(SampleWait.TURN, time.perf_counter() - turn.waits_since, turn.has_adapter)
        return self._client.running.progress(request_id)

    def adapters_in_flight(self) -> int:
        return 0 if self._client is None else self._client.running.adapters

    def start(self, job: SampleJob, sampler: Sampler, entry: Entry) -> None:
        """Forward a sample that is recorded. `entry` leaves the gate when the sample has ended."""
        began, turn = time.perf_counter(), self._gate.turn(entry, job, sampler)
        task = asyncio.create_task(self._forward(job, sampler, turn, began))
        self._running[job.request_id] = task, turn
        self._gate.ages.begin(job.request_id, began)

        def end(task: asyncio.Task[None]) -> None:
            self._running.pop(job.request_id, None)
            self._gate.ages.end(job.request_id)
            if task.cancelled():
                self._gate.metrics.cancelled()
            entry.leave()
            self._samplers.note_use(sampler)  # again: the sample may have taken hours

        task.add_done_callback(end)

    async def _forward(self, job: SampleJob, sampler: Sampler, turn: Turn, began: float) -> None:
        assert self._client is not None
        upstream_s = 0.0
        try:
            async with turn:
                turn.used = answer = await self._client.sample(job, turn.priority)
                turn.server = answer.server
            outcome = Outcome(answer.body, "proto:sample")
            if answer.changed_weights:
                self._client.counts["changed_weights"] += 1
                logger.info("request %s was sampled by several versions of the weights", job.request_id)
            upstream_s = answer.upstream_s
            self.completed += 1
        except FailedRequest as error:
            outcome = await self._failure(error, sampler)
        except Exception:  # the exception's text may hold addresses and names that only the operator may see
            logger.exception("forwarding request %s failed", job.request_id)
            message = f"the server could not compute this sample; its log says why, under request {job.request_id}"
            outcome = Outcome(error=message, error_category=ErrorCategory.SERVER)
        span = None if (trace := current_trace.get()) is None else trace.child("settle")
        await self._futures.settle(job.request_id, outcome)
        if span is not None:
            span.end({"skyrl.request_id": job.request_id}, outcome.error)
        now = time.perf_counter()
        ended = outcome_label(outcome.error, outcome.error_category)
        self._gate.metrics.ended(ended, now - began, now - began - turn.waited_s - upstream_s)

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
            if (running := self._running.get(request_id)) is not None:
                running[0].cancel()

    async def drain(self, grace_s: float) -> None:
        """Wait until all samples have ended, then cancel those that still run after `grace_s`. Cancelled samples stay
        pending, and the next start of this process forwards them again. So do those that have not been sent yet."""
        for task, turn in self._running.values():
            if turn.waits_since is not None:
                task.cancel()
        if self._running:
            await asyncio.wait([task for task, _ in self._running.values()], timeout=grace_s)
        unfinished = [task for task, _ in self._running.values()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            logger.info("%d samples in flight are left for the next start", len(unfinished))
            await asyncio.gather(*unfinished, return_exceptions=True)


@dataclass(frozen=True)
class BaseModelSampling:
    """`base_name` is the inference servers' name for the base model. `client` is None if the engine samples,
    `current_weights` if the inference servers never change their weights. `places` is how many adapters they run at a
    time, None if that is unknown. `why_away` says why no inference server runs, if that is known."""

    base_name: str
    limits: Callable[[], ContextLimits]
    client: ForwardingClient | None
    gate: SamplingGate
    guard: FeatureGuard
    pictures: PictureIngress
    forwarded: ForwardedSamples
    current_weights: CurrentWeightsCheck | None = None
    places: int | None = None
    why_away: Callable[[], str] = lambda: ""


_SESSION = re.compile(rb'"sampling_session_id"\s*:\s*"([^"\\]{1,200})"')
_HEAD = 2**12
"""The SDK writes the fields of a sample in a fixed order, with this one near the beginning or the end."""


class BaseModels:
    """Sampling from a server's base models, in the order of its configuration."""

    def __init__(self, models: Sequence[BaseModelSampling], names: ByName) -> None:
        self._models = tuple(models)
        self._names = names

    def __iter__(self) -> Iterator[BaseModelSampling]:
        return iter(self._models)

    def of(self, base_model: str, field: str) -> BaseModelSampling:
        """The base model of a stored row. The only base model takes rows of every name: the operator may have
        given the base model another one since. Raises RequestError naming `field`."""
        if len(self._models) == 1:
            return self._models[0]
        number = self._names.numbers.get(base_model)
        if number is None:
            raise RequestError(
                f"belongs to the base model {base_model!r}, which is not served here any more; there is: "
                f"{', '.join(self._names.served)}",
                field=field,
            )
        return self._models[number]

    def with_sample(self, request_id: str) -> BaseModelSampling | None:
        """The base model that this process forwards a sample to now."""
        return next((model for model in self._models if request_id in model.forwarded), None)

    def guess(self, body: bytes, base_model_of: Callable[[str], str | None]) -> BaseModelSampling | None:
        """The base model of a sample whose body is not decoded yet: only to decode it faster. `base_model_of` tells
        the name of that of a sampling session that this process knows."""
        if len(self._models) == 1:
            return self._models[0]
        found = _SESSION.search(body, max(0, len(body) - _HEAD)) or _SESSION.search(body, 0, _HEAD)
        if found is None or (base_model := base_model_of(found[1].decode(errors="replace"))) is None:
            return None
        number = self._names.numbers.get(base_model)
        return None if number is None else self._models[number]
