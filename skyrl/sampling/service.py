"""Sample requests in the API process: finds the sampling session, checks and records the request, starts the sample.

A forwarded sample becomes an EXTERNAL future and a task (`base_model.ForwardedSamples`). With `colocate_all` a sample
becomes a SAMPLE future, which the engine runs.

`CutNotes` counts the samples whose `max_tokens` did not fit the context and was cut. Only the first one of a sampling
session gets a note, which the SDK writes to its user's log: the same note for each of thousands of samples would flood
that log.

`SampleOwnership` decides which of several API processes on one database forwards a sample. Each process writes a
heartbeat into the database every BEAT_S. If a process reads the same heartbeat of another process for MISSES rounds, it
treats that process as dead and takes over its samples; the first process to do so gets them. Rounds are counted, not
seconds, because no rounds pass while the database is away or the counting process is stopped. A process that was only
stalled finds at its next round that its samples have another owner, and leaves them to that owner. The outcome that is
stored first stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from skyrl.base.pictures.picture import Pictures
from skyrl.base.types.requests import SAMPLES, Kind, NewRequest, new_request_id, sample_sequence_ids
from skyrl.base.wire.errors import ErrorCategory, NotFound, RequestError
from skyrl.base.wire.sample_request import SampleRequest, decode_sample_request
from skyrl.sampling.base_model import BaseModels, BaseModelSampling, job_for
from skyrl.sampling.gate import Entry
from skyrl.sampling.job import SampleJob
from skyrl.sampling.metrics import RefusalMetrics
from skyrl.sampling.quotas import Quotas
from skyrl.storage.db.database import in_groups
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.processes import ApiProcesses, PendingSample
from skyrl.storage.db.samplers import Sampler, Samplers
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.doorbell import Doorbell
from skyrl.storage.futures.store import FutureStore
from skyrl.storage.notices import PeerNotifier

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Sampling sessions that got a note. When there are more, all are forgotten, and each gets one more note."""


def cut_to(request: SampleRequest, job: SampleJob) -> int | None:
    """The number to which `max_tokens` was cut; None if it was not cut."""
    asked = request.sampling_params.max_tokens
    if asked is None or job.max_tokens is None or job.max_tokens >= asked:
        return None
    return job.max_tokens


class CutNotes:
    """Counts cut samples, and remembers the sampling sessions that got a note."""

    def __init__(self) -> None:
        self.count = 0
        self._noted: dict[str, int | None] = {}
        """By sampling session: the `seq_id` of the sample that got the note."""

    def note(self, request: SampleRequest, job: SampleJob, sampler_id: str, *, new: bool) -> str | None:
        """A sentence for the user; None if nothing was cut, or if another sample of the sampling session got a note.
        A repeat (not `new`) gets its note again, because the first answer may be lost."""
        fits = cut_to(request, job)
        if fits is None:
            return None
        self.count += new
        asked = request.sampling_params.max_tokens
        if sampler_id not in self._noted:
            if len(self._noted) >= MAX_REMEMBERED:
                self._noted.clear()
            self._noted[sampler_id] = request.seq_id
            line = "sampling session %s: max_tokens is cut to what fits, first from %d to %d"
            logger.info(line, sampler_id, asked, fits)
        elif new or self._noted[sampler_id] != request.seq_id:
            return None
        return (
            f"sampling_params.max_tokens: {asked} is more than the {fits} tokens that fit the model's context after "
            f"this prompt of {len(job.prompt)}; it was cut to {fits}. Later samples of this sampling client are cut in "
            "the same way without another notice"
        )


CANCELLED = Outcome(error="cancelled by the client", error_category=ErrorCategory.USER)
SAMPLED_ELSEWHERE = Outcome(
    error="this server now samples in its engine; send the sample again", error_category=ErrorCategory.SERVER
)
NOT_FORWARDED = Outcome(
    error="the server could not forward this sample after its restart; its log says why",
    error_category=ErrorCategory.SERVER,
)


class Promise(msgspec.Struct, frozen=True):
    """The immediate answer to `asample`. `max_tokens` is set if the request's `max_tokens` was cut to this number.
    `note` is a sentence about the cut, for the first sample of a sampling session that is cut."""

    request_id: str
    sample_sequence_ids: list[str]
    max_tokens: int | None = None
    note: str | None = None


class SampleService:
    """Takes `asample` bodies. Where a base model has a client, this process forwards the samples. Otherwise the engine
    samples, and `engine` is its doorbell."""

    def __init__(
        self,
        futures: FutureStore,
        samplers: Samplers,
        sessions: Sessions,
        base_models: BaseModels,
        *,
        engine: Doorbell | None,
        quotas: Quotas,
        metrics: RefusalMetrics | None = None,
    ) -> None:
        self._futures = futures
        self._samplers = samplers
        self._sessions = sessions
        self.base_models = base_models
        self._engine = engine
        self._quotas = quotas
        self._metrics = metrics or RefusalMetrics()
        self._stopping = False
        self.cuts = CutNotes()
        self.to_engine = 0
        """Samples that were recorded for the engine."""

    async def submit(self, body: bytes, tenant: str) -> Promise:
        """Record one sample request and start it.

        Raises RequestError (400, 404, 429, 503); then nothing was recorded.
        """
        if self._stopping:
            self._metrics.refused("stopping")
            raise RequestError("the server is stopping; send the sample again", status=503, retry_after_s=1)
        guessed = self.base_models.guess(body, lambda session: self._cached_base_model(session, tenant))
        request = decode_sample_request(body, None if guessed is None else guessed.limits().vocab_size)
        sampler, model = await self._resolve(request, tenant)
        request_id = new_request_id()
        pictures = None
        if not request.prompt.is_text:
            vocab_size = model.limits().vocab_size
            body, request, pictures = await model.pictures.sample(body, request, vocab_size, tenant, request_id)
        job = _job(request, request_id, sampler, model, pictures)
        model.guard.check(request)
        request.prompt.chunks.clear()  # the job has the tokens, in less memory
        if request.seq_id is not None and not 0 <= request.seq_id < 2**63:
            raise RequestError("must be in [0, 2**63)", field="seq_id")
        entry, started = model.gate.enter(tenant, len(body)), False
        try:
            entry.charge(request_id, job.most_tokens)
            request_id, new = await self._futures.record(
                NewRequest(
                    kind=Kind.SAMPLE if model.client is None else Kind.EXTERNAL,
                    tenant=tenant,
                    session_id=sampler.session_id,
                    body=body,
                    sampling_session_id=sampler.id,
                    sample_seq_id=request.seq_id,
                    id=request_id,
                    not_before=entry.not_before,
                )
            )
            self._samplers.note_use(sampler)
            if new:
                if request_id != job.request_id:  # an earlier try was stored under another id
                    job = replace(job, request_id=request_id)
                    entry.recorded_as(request_id)
                if model.client is not None:
                    model.forwarded.start(job, sampler, entry)
                    started = True
                elif self._engine is not None:
                    self.to_engine += 1
                    self._engine.ring()
                    entry.hand_over()
        finally:
            if not started:
                entry.leave()
        note = self.cuts.note(request, job, sampler.id, new=new)
        return Promise(request_id, sample_sequence_ids(request_id, request.num_samples), cut_to(request, job), note)

    def _cached_base_model(self, sampling_session_id: str, tenant: str) -> str | None:
        sampler = self._samplers.cached(sampling_session_id, tenant)
        return None if sampler is None else sampler.base_model

    async def _resolve(self, request: SampleRequest, tenant: str) -> tuple[Sampler, BaseModelSampling]:
        field = "sampling_session_id"
        if request.sampling_session_id is None:
            raise RequestError("is missing: create a sampling session first", field=field)
        sampler = await self.open_sampler(request.sampling_session_id, tenant)
        model = self.base_models.of(sampler.base_model, field)
        if model.current_weights is not None:
            await model.current_weights.check(sampler.weights, field)
        return sampler, model

    async def open_sampler(self, sampling_session_id: str, tenant: str, field: str = "sampling_session_id") -> Sampler:
        """The tenant's sampling session, if its session is active. Raises NotFound naming `field`."""
        sampler = self._samplers.cached(sampling_session_id, tenant)
        if sampler is None:
            sampler = await self._samplers.find(sampling_session_id, tenant)
        if sampler is None:
            raise NotFound(f"no sampling session {sampling_session_id!r}", field=field)
        # The sampling session's row is closed later. Not 410: on a 410 the SDK sends the sample again for ever.
        session = await self._sessions.find(sampler.session_id, tenant)
        if session is None or session.status != "active":
            raise NotFound(f"the session of {sampling_session_id!r} has ended", field=field)
        return sampler

    def adopt(self, sample: PendingSample) -> Entry | None:
        """This process settles a pending sample that another API process, or the predecessor of this one, has left.
        Returns its entry, which counts from now on, for `forward_again`; None if this process settles it already."""
        session_id = sample.sampling_session_id
        sampling = None if session_id is None else (session_id, sample.sample_seq_id)
        if not self._futures.adopt(sample.id, sample.tenant, sample.session_id, sample.digest, sampling):
            return None
        gate = next(iter(self.base_models)).gate  # what one tenant may have counts over all base models
        return gate.enter_again(sample.tenant, len(sample.body), sample.id, sample.not_before)

    async def forward_again(self, sample: PendingSample, entry: Entry) -> None:
        """Forward an adopted sample, unless it has ended or been left since. It fails if the server has changed so that
        it cannot be forwarded any more. Raises DatabaseError; then call this again."""
        try:
            is_forwarded = self._is_left(sample.id) and await self._forward_again(sample, entry)
        except DatabaseError:
            raise
        except Exception:  # the exception's text may hold addresses and names that only the operator may see
            logger.exception("sample %s, which was left, could not be forwarded", sample.id)
            is_forwarded = False
            await self._futures.settle(sample.id, NOT_FORWARDED)
        if not is_forwarded:
            entry.leave()

    async def _forward_again(self, sample: PendingSample, entry: Entry) -> bool:
        """Whether the sample is forwarded, and not settled or somebody else's."""
        pictures = None
        try:
            guessed = self.base_models.guess(sample.body, lambda name: self._cached_base_model(name, sample.tenant))
            request = decode_sample_request(sample.body, None if guessed is None else guessed.limits().vocab_size)
            sampler, model = await self._resolve(request, sample.tenant)
            if not request.prompt.is_text:
                pictures = await model.pictures.stored_sample(request, sample.tenant)
            job = _job(request, sample.id, sampler, model, pictures)
        except RequestError as error:  # the session has ended, or the server has another base model now
            await self._futures.settle(sample.id, Outcome(error=error.message, error_category=ErrorCategory.USER))
            return False
        if model.client is None:
            await self._futures.settle(sample.id, SAMPLED_ELSEWHERE)
            return False
        if not self._is_left(sample.id):  # any more
            return False
        model.forwarded.start(job, sampler, entry)
        return True

    def _is_left(self, request_id: str) -> bool:
        """Whether this process has to forward a pending sample, and does not yet."""
        is_own = self._futures.forwards(request_id) and self._futures.is_pending(request_id)
        return is_own and self.base_models.with_sample(request_id) is None

    def cancel(self, request_ids: list[str]) -> None:
        """Stop forwarding these samples; vLLM stops computing them, too."""
        for model in self.base_models:
            model.forwarded.cancel(request_ids)

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
        if self._futures.is_pending(request_id):  # if not, its result is being written now
            self.cancel([request_id])
        await self._futures.end(request_id, CANCELLED)

    @property
    def in_flight(self) -> int:
        """Samples that this process forwards now."""
        return sum(len(model.forwarded) for model in self.base_models)

    @property
    def forwarded(self) -> int:
        """Samples that this process has forwarded, and that have a result."""
        return sum(model.forwarded.completed for model in self.base_models)

    def refuse_new(self) -> None:
        """Answer new samples with 503 from now on: the server is stopping."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def drain(self, grace_s: float) -> None:
        """Wait up to `grace_s` until samples in flight have ended. The others stay pending, and the next start of this
        process forwards them."""
        self.cancel(list(self._quotas.waiting))  # these have not been sent yet
        await asyncio.gather(*(model.forwarded.drain(grace_s) for model in self.base_models))


def _job(
    request: SampleRequest, request_id: str, sampler: Sampler, model: BaseModelSampling, pictures: Pictures | None
) -> SampleJob:
    full = model.current_weights is not None
    limits, name = model.limits(), model.base_name
    return job_for(request, request_id, sampler, limits, name, full_finetuning=full, pictures=pictures)


BEAT_S = 2.0
MISSES = 5
TURNS_BETWEEN = 8
"""Of the event loop, which accepts one connection in each. After a restart thousands of polls connect at once, and
heartbeats wait behind them; a turn in which nothing else is due takes some microseconds."""


class SampleOwnership:
    """Keeps `peers.living`, the other processes that are alive, and takes over the samples of dead ones."""

    def __init__(
        self,
        processes: ApiProcesses,
        peers: PeerNotifier,
        futures: FutureStore,
        sampling: SampleService,
    ) -> None:
        self._processes = processes
        self._peers = peers
        self._futures = futures
        self._sampling = sampling
        self._beats: dict[str, tuple[float, int]] = {}
        """By process: the last heartbeat that was read, and the number of rounds for which it has not changed."""
        self._left: deque[tuple[PendingSample, Entry]] = deque()
        """Adopted samples that are not forwarded yet."""
        self.adopted = asyncio.Event()
        """Is set when `forward_left` has something to do."""

    async def start(self) -> None:
        """Adopt the samples of this process's predecessor, and samples that no process owns: then polls for them may
        come. `forward_left` forwards them."""
        self._note_heartbeats(await self._processes.beat())
        if self._may_take:
            await self._processes.take_over({})
        await self._adopt(await self._processes.own())

    async def forward_left(self) -> None:
        """Forward the samples that were left, one in TURNS_BETWEEN turns of the event loop: there may be thousands.
        Called by one task alone, when `adopted` is set and every few seconds."""
        while self._left and not self._sampling.stopping:
            sample, entry = self._left.popleft()
            try:
                await self._sampling.forward_again(sample, entry)
            except DatabaseError:
                self._left.append((sample, entry))  # behind the others, whose rows may be readable
                raise
            for _ in range(TURNS_BETWEEN):
                await asyncio.sleep(0)

    async def round(self) -> None:
        """Call every BEAT_S: writes this process's heartbeat, and takes over the samples of dead processes."""
        self._note_heartbeats(await self._processes.beat())
        if self._sampling.stopping:
            return
        taken = 0
        dead = {process: heartbeat for process, (heartbeat, rounds) in self._beats.items() if rounds >= MISSES}
        if self._may_take and (dead or await self._processes.left()):
            taken = await self._processes.take_over(dead)
            logger.info("%d samples of API processes that are gone are taken over; dead: %s", taken, [*dead])
        if taken or not self._peers.alone:
            await self._reconcile()

    @property
    def sees_others(self) -> bool:
        """Whether the database lists other processes, alive or dead."""
        return bool(self._beats)

    @property
    def _may_take(self) -> bool:
        """Where the engine samples, samples that nobody owns are left to others that may forward them."""
        return self._peers.alone or any(model.client is not None for model in self._sampling.base_models)

    def _note_heartbeats(self, heartbeats: dict[str, float]) -> None:
        """Compare the heartbeats of other processes with those of the round before."""
        before = self._beats
        self._beats = {}
        for process, heartbeat in heartbeats.items():
            last, rounds = before.get(process, (None, 0))
            self._beats[process] = (heartbeat, rounds + 1 if heartbeat == last else 0)
        self._peers.living = frozenset(process for process, (_, rounds) in self._beats.items() if rounds < MISSES)

    async def _reconcile(self) -> None:
        """Make memory agree with the database. Adopt a sample that this process owns in the database but does not have
        in memory: it was taken over, or the connection broke when it was committed. Leave a sample that another process
        owns in the database to that process. Forwards nothing: it would take long, and heartbeats come from here."""
        forwarded = self._futures.forwarded()  # before the read: a sample recorded during the read is in the database
        owned = await self._processes.own()
        await self._adopt(owned)
        not_owned = [request_id for request_id in forwarded if request_id not in owned]
        if not_owned:
            ended = await self._futures.read_outcomes(not_owned)
            self._sampling.cancel(ended + self._futures.leave(not_owned))

    async def _adopt(self, owned: Iterable[str]) -> None:
        """The samples among `owned` that are not in memory."""
        for some in in_groups(request_id for request_id in owned if not self._futures.forwards(request_id)):
            for sample in await self._processes.samples(some):
                if (entry := self._sampling.adopt(sample)) is not None:
                    self._left.append((sample, entry))
                    self.adopted.set()

    async def leave(self) -> None:
        """This process ends. Another process, or its next start, takes its pending samples over."""
        await self._processes.leave()
