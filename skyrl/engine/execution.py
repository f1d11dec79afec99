"""How a command runs: on which thread, and from its body to its stored outcome.

All steps of a command run on one thread: read the body, run, write the outcome, ring the API. For a small command, a
switch to another thread would cost more than the read or the write. Passes run in batches: their pictures are read from
the database, each body is decoded and checked, and the valid passes run together. Does not decide which command is
next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from skyrl.base.pictures.places import place
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.types.requests import FILE_COMMANDS, SAVES, Command, Kind
from skyrl.base.wire.errors import FailedRequest, RequestError
from skyrl.base.wire.results import encode_forward_backward, encode_json
from skyrl.base.wire.sample_request import LOCATION
from skyrl.base.wire.training import ForwardBackward, decode_forward_backward
from skyrl.engine.command_log import Settlement, failed, fails_model
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.exclusive_commands import ExclusiveCommands
from skyrl.engine.interludes import Interludes
from skyrl.engine.metrics import EngineMetrics, ModelWaits, RunTimes, phase_of
from skyrl.engine.model_ends import ModelEnds
from skyrl.engine.publishing import WeightPublisher
from skyrl.engine.ratios import RatioCheck
from skyrl.engine.scheduler import Scheduler
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.stored_losses import StoredLosses
from skyrl.engine.telemetry import CommandTracing
from skyrl.engine.threads import EngineThreads
from skyrl.storage.db import models as rows
from skyrl.storage.db import pictures as picture_rows
from skyrl.storage.db import run_steps, usage
from skyrl.storage.db.database import Change, Connection, Database, Displaced, FencedDatabase, together
from skyrl.storage.db.faults import DatabaseError, is_transient
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.pictures import PictureFiles
from skyrl.storage.db.run_steps import Spent, StepSums
from skyrl.trainer.protocol import Backend, Datum, PassResult, TrainingPass

GAP = "kl:mean"
"""The metric of a pass that compares its logprobs with the sampler's."""
REWARDS = "rewards"
"""The input of a critic's loss with a reward for each position."""


@dataclass(frozen=True)
class PassOutcomes:
    """One outcome per command, in order. `tokens`: by model id, the number of tokens in passes that succeeded. `gaps`:
    for each of them with logprobs of the sampler, the mean of sampler's minus trainer's logprobs in nats. `trained`: by
    model id, the sums over the forward_backward passes that succeeded."""

    outcomes: list[tuple[Command, Outcome]]
    tokens: Mapping[str, int] = field(default_factory=dict)
    gaps: Sequence[float] = ()
    trained: Mapping[str, StepSums] = field(default_factory=dict)


def decode_pass(
    command: Command, body: bytes, backend: Backend, pictures: PassPictures, losses: StoredLosses
) -> TrainingPass:
    """The command's pass, checked. Raises RequestError or InvalidRequest, naming field and datum, and FailedRequest."""
    assert command.model_id is not None  # checked by the API; the model_id in the body is ignored
    forward_only = command.kind is Kind.FORWARD
    decoded = decode_forward_backward(body, command.body_format, forward_only=forward_only)
    data, files = pictures.data_of(decoded, command.tenant)
    training_pass = TrainingPass(
        model_id=command.model_id,
        data=data,
        loss_fn=decoded.loss_fn,
        loss_config=decoded.loss_config,
        backward=not decoded.forward_only,
        files=files,
        custom_loss=None if decoded.loss_id is None else losses.find(decoded.loss_id, command),
    )
    backend.check(training_pass)
    return training_pass


def run_passes(
    commands: Sequence[Command],
    bodies: dict[str, bytes],
    backend: Backend,
    pictures: PassPictures,
    losses: StoredLosses,
    ratios: RatioCheck,
) -> PassOutcomes:
    """Run passes on the backend thread. An invalid pass fails alone; the other passes run.

    Raises BackendLost: then no outcome is known, and the engine must end.
    """
    outcomes: dict[str, Outcome] = {}
    tokens: Counter[str] = Counter()
    gaps: list[float] = []
    trained: dict[str, StepSums] = {}
    runnable: list[tuple[Command, TrainingPass]] = []
    for command in commands:
        try:
            runnable.append((command, decode_pass(command, bodies[command.request_id], backend, pictures, losses)))
        except Exception as error:  # the client gets it, or the log
            if is_transient(error):
                raise
            outcomes[command.request_id] = failed(error, command)
    results: Sequence[PassResult | Exception]
    try:
        results = backend.run([training_pass for _, training_pass in runnable]) if runnable else []
    except Exception as error:  # each pass gets it
        results = [error] * len(runnable)
    for (command, training_pass), result in zip(runnable, results, strict=True):
        if isinstance(result, Exception):
            outcomes[command.request_id] = failed(result, command)
        else:
            notice = ratios.notice(training_pass.model_id, result.metrics, training_pass.loss_config)
            encoded = encode_forward_backward(result.logprobs, result.metrics | notice, result.values)
            outcomes[command.request_id] = Outcome(encoded, "proto:forward_backward")
            size = sum(len(datum.tokens) for datum in training_pass.data)
            tokens[training_pass.model_id] += size
            if GAP in result.metrics:
                gaps.append(result.metrics[GAP])
            if training_pass.backward:
                sums = StepSums.of_pass(size, result.metrics, rewards_of(training_pass))
                before = trained.get(training_pass.model_id)
                trained[training_pass.model_id] = sums if before is None else before + sums
    return PassOutcomes([(command, outcomes[command.request_id]) for command in commands], tokens, gaps, trained)


def rewards_of(training_pass: TrainingPass) -> list[float]:
    """The reward of each sequence that has inputs `rewards` (of a critic): their sum over its positions. None of a
    custom loss, whose inputs mean what the client wants."""
    if training_pass.custom_loss is not None:
        return []
    data = training_pass.data
    return [float(datum.loss_inputs[REWARDS].sum()) for datum in data if REWARDS in datum.loss_inputs]


class PassPictures:
    """`sight`: how the base model sees."""

    def __init__(self, database: Database, sight: VisionConfig | NoVision) -> None:
        self._database = database
        self._files = PictureFiles(database)
        self._sight = sight

    def data_of(self, decoded: ForwardBackward, tenant: str) -> tuple[list[Datum], dict[str, bytes]]:
        """The data of a pass, and by digest the files of their pictures. Raises RequestError naming the chunk, and
        FailedRequest if a file is not stored any more. Reads nothing for a pass of text alone."""
        images = [image for of_datum in decoded.images for image in of_datum]
        if not images:
            pairs = zip(decoded.tokens, decoded.loss_inputs, strict=True)
            return [Datum(tokens, inputs) for tokens, inputs in pairs], {}
        if isinstance(self._sight, NoVision):
            raise RequestError(f"is an image, and the base model takes text only: {self._sight}", field=images[0].name)
        named = {image.location.removeprefix(LOCATION) for image in images}
        known = self._database.read(lambda c: picture_rows.find(c, tenant, named))
        data: list[Datum] = []
        for text, of_datum, inputs in zip(decoded.tokens, decoded.images, decoded.loss_inputs, strict=True):
            tokens, pictures = place(text, of_datum, known, self._sight) if of_datum else (text, ())
            data.append(Datum(tokens, inputs, pictures))
        files = self._files.read(tenant, known)
        if len(files) < len(known):
            raise FailedRequest("an image of this request is not stored any more")
        return data, files


logger = logging.getLogger(__name__)

_UPDATES = frozenset({Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.LOAD_WEIGHTS})
"""After these the next samples are likely to be of the weights that are trained."""


class Execution:
    """Runs commands that the scheduler has handed out, and tells the scheduler when they are settled.

    Call the public methods on the event loop. They raise DatabaseError, Displaced and BackendLost: then the engine ends
    with the command unsettled, and the next engine finds the command in the command log.
    """

    def __init__(
        self,
        database: FencedDatabase,
        backend: Backend,
        exclusive: ExclusiveCommands,
        snapshots: Snapshots,
        settlement: Settlement,
        ledger: CrashLedger,
        threads: EngineThreads,
        scheduler: Scheduler,
        publisher: WeightPublisher,
        model_ends: ModelEnds,
        run_times: RunTimes,
        metrics: EngineMetrics,
        tracing: CommandTracing,
        pictures: PassPictures,
        losses: StoredLosses,
        interludes: Interludes,
    ) -> None:
        self._database = database
        self._backend = backend
        self._interludes = interludes
        interludes.run = self._interlude
        backend.yield_to(interludes.between)
        self._exclusive_commands = exclusive
        self._snapshots = snapshots
        self._settlement = settlement
        self._ledger = ledger
        self._threads = threads
        self._scheduler = scheduler
        self._publisher = publisher
        self._model_ends = model_ends
        self._run_times = run_times
        self._metrics = metrics
        self._tracing = tracing
        self._pictures = pictures
        self._losses = losses
        self._ratios = RatioCheck()
        self._waits = ModelWaits()

    # On the event loop: choose the thread, and wait until the command is settled.

    async def run_passes(self, commands: Sequence[Command]) -> None:
        """Run passes of any models, merged where the backend can merge them."""
        await self._threads.on_backend(lambda: self._passes(commands))
        self._scheduler.finish(commands)

    async def run_exclusive(self, command: Command) -> None:
        """Run one exclusive command: a save or a load on a file thread, any other on the backend thread."""
        on_thread = self._threads.on_files if command.kind in FILE_COMMANDS else self._threads.on_backend
        outcome = await on_thread(lambda: self._exclusive(command))
        if outcome is not None:
            await self._model_ends.end_after(command, outcome)
        self._scheduler.finish([command])

    async def snapshot_overdue(self) -> None:
        """Snapshot models that have run commands without a step for too long. A busy model waits for a later call."""
        for model_id in self._snapshots.overdue():
            if model_id not in self._scheduler:
                self._snapshots.stop_tracking(model_id)
            elif not self._scheduler.is_busy(model_id):
                self._scheduler.hold(model_id)
                await self._threads.on_backend(lambda model_id=model_id: self._snapshot_now(model_id))
                self._scheduler.release(model_id)

    async def snapshot_last(self, until: float) -> None:
        """The engine is stopping and runs nothing: snapshot all models, so that the next start repeats no command.

        Leaves out a model that is being restored or whose command is not settled, and one whose snapshot would end
        after `until` (monotonic seconds). Raises Displaced, and writes nothing then.
        """
        lacking = [each for each in self._snapshots.lacking() if each in self._scheduler]
        ready = [model_id for model_id in lacking if not self._scheduler.is_busy(model_id)]
        if not ready:
            return
        try:
            await asyncio.to_thread(self._database.confirm_claim)
        except DatabaseError as error:
            logger.warning("%d models have no last snapshot: the database cannot be used: %s", len(ready), error)
            return
        for model_id in ready:
            if time.monotonic() + self._snapshots.expected_s(model_id) > until:
                logger.warning("model %s has no last snapshot: there was no time (stop_grace_s)", model_id)
            else:
                await self._threads.on_backend(lambda model_id=model_id: self._snapshot(model_id, self._snapshots.take))

    # On the command's own thread.

    def _passes(self, commands: Sequence[Command]) -> None:
        with self._ledger.running([command.request_id for command in commands]), self._metrics.phases.phase("pass"):
            started = self._begin(commands)
            bodies = self._bodies(commands)
            runnable = [command for command in commands if command.request_id in bodies]  # other rows were deleted
            waits = self._waits.began(runnable, time.time())
            with self._interludes.around(commands) as interrupted:
                passes = run_passes(runnable, bodies, self._backend, self._pictures, self._losses, self._ratios)
            started += interrupted.seconds
            busy_s = time.perf_counter() - started

            def count(connection: Connection) -> None:
                usage.count_training(connection, passes.tokens)
                run_steps.add_passes(connection, passes.trained, busy_s, waits)

            outcomes = [(command.request_id, outcome) for command, outcome in passes.outcomes]
            self._settlement.settle(outcomes, count)
            self._waits.ended(runnable, time.time())
            models = {command.model_id for command in runnable}
            self._metrics.commands.passed(len(models), sum(passes.tokens.values()), passes.gaps)
            for command, outcome in passes.outcomes:
                self._ended(command, outcome, started)
            for command in runnable:
                assert command.model_id is not None
                self._snapshots.ran(command.model_id, command.kind)
        self._run_times.ran(runnable, seconds := time.perf_counter() - started)
        logger.debug("%d passes in %.1f ms", len(runnable), seconds * 1e3)
        interrupted.check()

    def _interlude(self, commands: Sequence[Command]) -> None:
        """Passes, or optimizer steps, between two micro-batches of other passes."""
        if commands[0].is_pass:
            self._passes(commands)
        else:
            for command in commands:
                self._exclusive(command)

    def _exclusive(self, command: Command) -> Outcome | None:
        """Returns None, and runs nothing, when the command's row was deleted."""
        with self._ledger.running([command.request_id]), self._metrics.phases.phase(phase_of(command.kind)):
            started = self._begin([command])
            body = self._bodies([command]).get(command.request_id)
            outcome = None if body is None else self._run_and_settle(command, body)
        if outcome is not None:
            self._ended(command, outcome, started)
        if outcome is not None and command.model_id is not None and command.seq_id is not None:
            self._snapshots.ran(command.model_id, command.kind)
            if outcome.error is None:
                self._snapshot_after(command.kind, command.model_id)
        if outcome is not None:
            self._run_times.ran([command], time.perf_counter() - started)
        return outcome

    def _run_and_settle(self, command: Command, body: bytes) -> Outcome:
        change: Change | None = None
        copy: Callable[[], None] | None = None
        loading: Future[None] | None = None
        started = time.perf_counter()
        wait_s = self._waits.began([command], time.time()).get(command.model_id or "", 0.0)
        try:
            ran = self._exclusive_commands.run(command, body)
            outcome = Outcome(encode_json(ran.result))
            change, copy = ran.change, ran.copy
            if command.kind is Kind.OPTIM_STEP and command.model_id is not None:
                rate = ran.result["metrics"].get("learning_rate")
                change = run_steps.end_step(command.model_id, time.perf_counter() - started, rate, wait_s)
            elif command.kind in FILE_COMMANDS and command.model_id is not None:
                saved = command.kind is Kind.SAVE_WEIGHTS_FOR_SAMPLER
                spent = Spent(wait_s=wait_s, save_s=time.perf_counter() - started, saves=int(saved))
                change = together(change, run_steps.add_save(command.model_id, spent))
            if ran.weights is not None:
                loading = self._publisher.publish(ran.weights)
            if command.kind in _UPDATES and command.model_id is not None:
                self._ratios.updated(command.model_id)
        except Exception as error:  # the client gets it, or the log
            if isinstance(error, Displaced) or is_transient(error):  # the next engine runs the command
                raise
            outcome, change = failed(error, command), fails_model(command)
        power_safe = command.kind in SAVES and copy is None
        self._settlement.settle([(command.request_id, outcome)], change, power_safe=power_safe)
        self._waits.ended([command], time.time())
        if copy is not None:
            self._threads.later_on_files(copy)
        if loading is not None:
            loading.result()  # the model's next version is not loaded before this one
        return outcome

    def _begin(self, commands: Sequence[Command]) -> float:
        """Count that these commands begin. Returns the time of `time.perf_counter`."""
        for command in commands:
            self._metrics.commands.began(command.kind, command.accepted_at)
        return time.perf_counter()

    def _ended(self, command: Command, outcome: Outcome, started: float) -> None:
        """Count and trace a command that is settled."""
        metrics = self._metrics.commands
        seconds = time.perf_counter() - started
        if command.trace is not None:
            self._tracing.ran(command, time.time() - seconds, outcome.error_category)
        metrics.ran(command.kind, seconds)
        metrics.ended(command.kind, outcome.error, outcome.error_category)
        if command.kind is Kind.SAVE_WEIGHTS_FOR_SAMPLER and outcome.error is None:
            metrics.weights_ready(command.accepted_at)

    def _bodies(self, commands: Sequence[Command]) -> dict[str, bytes]:
        ids = [command.request_id for command in commands]
        return self._database.read(lambda c: rows.bodies(c, ids))

    # Snapshots, on the backend thread.

    def _snapshot_now(self, model_id: str) -> None:
        if not self._snapshot(model_id, self._snapshots.take):
            self._snapshots.put_off(model_id)

    def _snapshot_after(self, kind: Kind, model_id: str) -> None:
        """Snapshot after an optimizer step if the last snapshot is old, and after every load (on a file thread)."""
        if kind is Kind.OPTIM_STEP:
            self._snapshot(model_id, self._snapshots.after_step)
        elif kind is Kind.LOAD_WEIGHTS:
            self._threads.wait_for_backend(lambda: self._snapshot(model_id, self._snapshots.take))

    def _snapshot(self, model_id: str, take: Callable[[str, int], None]) -> bool:
        """Whether no snapshot is missing."""
        next_seq = self._scheduler.next_seq(model_id)
        if next_seq is None:  # the model is closed
            return True
        with self._metrics.phases.phase("snapshot"):
            return self._snapshots.attempt(take, model_id, next_seq)
