"""The engine's loop: waits for work, takes commands from the scheduler, and runs them in turns.

The scheduler decides which command is next, `execution` how a command runs, the backend what a command computes. The
functions that a pass goes through, from top to bottom:

    Engine.run            read the command log, begin a turn
    Execution.run_passes  on the backend thread: read the bodies, then
    run_passes            decode and check each body
    Backend.run           forward, backward
    Settlement.settle     write the outcomes, ring the API

`SampleTurns` runs the samples that wait after each turn, where trainer and sampler share a device.
`FileCommands` runs saves and loads on file threads while other models train: an RL loop samples from the adapter that
it has just saved, so its save does not wait for a turn of training to end. For the same reason `FileCommands` reads new
commands while a turn runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from skyrl.base.types.requests import Command
from skyrl.base.wire.errors import ErrorCategory
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.engine.command_log import CommandLog, Settlement
from skyrl.engine.execution import Execution
from skyrl.engine.metrics import EngineMetrics
from skyrl.engine.model_ends import ModelEnds
from skyrl.engine.scheduler import Scheduler, cost_of
from skyrl.engine.sweeping import Sweep
from skyrl.engine.threads import EngineSignals, EngineThreads
from skyrl.runtime.processes.host_resources import trim
from skyrl.storage.db import models as rows
from skyrl.storage.db import usage
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.futures import Outcome
from skyrl.storage.doorbell import SESSIONS

SAFETY_POLL_S = 2.0
"""How often the engine asks the database for commands and ended sessions, in case a ring was lost, and looks for models
whose snapshots are overdue."""
NOTE_OLDEST_S = 1.0
TRIM_AFTER_S = 30.0
"""Without work for so long, memory is given back. A run that samples for less between its passes keeps it: a pass of
SmolLM2-135M that took its memory again was 0.7 s slower, of 3 s."""
EXIT_S = 3.0
"""What the process needs to exit after its last snapshot, of the time that it has for its stop."""


class Engine:
    """Runs commands until it is stopped or fails. `build_engine` makes the engine and its parts."""

    def __init__(
        self,
        signals: EngineSignals,
        threads: EngineThreads,
        scheduler: Scheduler,
        log: CommandLog,
        execution: Execution,
        file_commands: FileCommands,
        samples: SampleTurns,
        model_ends: ModelEnds,
        sweep: Sweep,
        metrics: EngineMetrics,
        *,
        merges_passes: bool,
        stop_grace_s: float,
    ) -> None:
        """`merges_passes`: the backend gains from running passes of several models together. `stop_grace_s`: how long
        the engine may take to end when it is told to."""
        self._signals = signals
        self._threads = threads
        self._scheduler = scheduler
        self._log = log
        self._execution = execution
        self._file_commands = file_commands
        self._samples = samples
        self._model_ends = model_ends
        self._sweep = sweep
        self._metrics = metrics
        self._merges_passes = merges_passes
        self._stop_grace_s = stop_grace_s
        self._busy_at: float | None = None
        """When the last turn ended, in monotonic seconds; None if its memory was given back."""
        self._poll_due = 0.0
        """When the next safety poll is due, in monotonic seconds."""

    def ring(self, messages: Sequence[str] = ()) -> None:
        """The database has new commands; or, if `messages` contain SESSIONS, a session that has ended."""
        if SESSIONS in messages:
            self._poll_due = 0.0
        self._log.note_news()
        self._signals.wake()

    async def run(self) -> None:
        """Run until stopped; the running turn ends first, then all models are snapshotted. Raises the error that the
        engine has failed of."""
        try:
            await self._run_turns()
            assert self._signals.stopped_at is not None
            await self._execution.snapshot_last(self._signals.stopped_at + self._stop_grace_s - EXIT_S)
        finally:
            await self._threads.shut_down()

    async def _run_turns(self) -> None:
        """Run until stopped. Nothing runs any more when this returns or raises."""
        work = (self._sweep.run(), self._file_commands.listen(), self._note_oldest())
        background = [asyncio.create_task(each) for each in work]
        try:
            while not self._signals.is_stopped:
                self._signals.raise_failure()
                self._signals.work.clear()
                await self._poll_if_due()
                await self._log.read()
                self._file_commands.start_ready()
                self._samples.hold_or_release()
                if self._scheduler.has_work:
                    await self._turn()
                else:
                    await self._wait_for_work()
        finally:
            self._signals.stop()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, *self._file_commands.running, return_exceptions=True)

    async def _poll_if_due(self) -> None:
        if time.monotonic() >= self._poll_due:
            self._poll_due = time.monotonic() + SAFETY_POLL_S
            self._log.note_news()
            await self._model_ends.end_sessions()
            await self._log.give_up_gaps()
            await self._execution.snapshot_overdue()

    async def _wait_for_work(self) -> None:
        """Wait for a ring, the next safety poll, or the start of a delayed command. After a while without
        work give back what turns have freed: glibc keeps up to all that a pass took."""
        idle_s = self._poll_due - time.monotonic()
        if (start := self._scheduler.next_start) is not None:
            idle_s = min(idle_s, max(0.0, start - time.time()))
        with contextlib.suppress(TimeoutError), self._metrics.phases.phase("idle"):
            if self._busy_at is not None and time.monotonic() >= self._busy_at + TRIM_AFTER_S:
                self._busy_at = None
                await asyncio.to_thread(trim)
            async with asyncio.timeout(idle_s):
                await self._signals.work.wait()

    async def _note_oldest(self) -> None:
        """Until cancelled, note how long the oldest command has waited: also while a turn runs, which may hang."""
        while True:
            self._metrics.commands.oldest_accepted_at = self._scheduler.oldest
            await asyncio.sleep(NOTE_OLDEST_S)

    async def _turn(self) -> None:
        """Run one share of training, then the waiting samples.

        If passes are not merged, a share belongs to one model. Alternating between models command by command would
        finish all tenants at the same late moment; from then on they would all train, and all sample, at the same time
        (docs/decisions/fair-shares.md).
        """
        ready = self._scheduler.ready_models()
        if self._merges_passes:
            await self._run_share(ready)
        else:
            spent = 0
            while (
                spent < self._scheduler.budget
                and not self._signals.is_stopped
                and (cost := await self._run_share(ready[:1]))
            ):
                spent += cost
        await self._samples.run()
        self._busy_at = time.monotonic()

    async def _run_share(self, model_ids: Sequence[str]) -> int:
        """Run passes of these models, then one exclusive command of each. Returns their cost as the scheduler counts
        it, in bytes."""
        passes = self._scheduler.take_passes(model_ids)
        if passes:
            await self._execution.run_passes(passes)
        await self._log.read()
        self._file_commands.start_ready()
        exclusive = self._scheduler.take_exclusive(model_ids)
        for command in exclusive:
            await self._execution.run_exclusive(command)
        return sum(cost_of(command) for command in (*passes, *exclusive))


logger = logging.getLogger(__name__)


class FileCommands:
    """Call all methods on the event loop. Each running command has its own task."""

    def __init__(self, log: CommandLog, scheduler: Scheduler, execution: Execution, signals: EngineSignals) -> None:
        self._log = log
        self._scheduler = scheduler
        self._execution = execution
        self._signals = signals
        self.running: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Until cancelled, start saves and loads whenever commands arrive, also while a turn runs."""
        while True:
            await self._signals.arrived.wait()
            self._signals.arrived.clear()
            try:
                await self._log.read()
                self.start_ready()
            except DatabaseError:
                logger.exception("new commands could not be read; the next turn tries again")

    def start_ready(self) -> None:
        """Start the saves and loads that the scheduler has, and whose turn has come."""
        for command in self._scheduler.take_file_commands():
            task = asyncio.create_task(self._execution.run_exclusive(command))
            self.running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Wake the engine: commands that waited for this command may run. If the task raised, end the engine, because a
        failure of the command itself is an outcome and raises nothing."""
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._signals.fail(error)
        self._signals.wake()


class SampleTurns:
    """`sampler` is None where API processes forward samples. There, sample commands from an earlier colocated run of
    the server fail."""

    def __init__(
        self, database: Database, scheduler: Scheduler, settlement: Settlement, sampler: ColocatedSampler | None
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._settlement = settlement
        self._sampler = sampler

    def hold_or_release(self) -> None:
        """Samples wait while the sampler cannot run them."""
        self._scheduler.hold_samples(self._sampler is not None and not self._sampler.may_run)

    async def run(self) -> None:
        """Run and settle the waiting samples."""
        commands = self._scheduler.take_samples()
        if not commands:
            return
        if self._sampler is None:
            await self._fail(commands)
        else:
            await self._sample(commands, self._sampler)

    async def _fail(self, commands: Sequence[Command]) -> None:
        message = "this server now forwards samples to its inference server; send the sample again"
        outcome = Outcome(error=message, error_category=ErrorCategory.SERVER)
        await asyncio.to_thread(self._settlement.end, [(command, outcome) for command in commands])
        self._scheduler.finish(commands)

    async def _sample(self, commands: Sequence[Command], sampler: ColocatedSampler) -> None:
        ids = [command.request_id for command in commands]  # some may have been cancelled: then they have no body
        bodies = await self._database.read_async(lambda c: rows.bodies(c, ids, pending=True))
        sampled = await sampler.run(commands, bodies)
        by_id = {command.request_id: command for command in commands}
        ended = [(by_id[request_id], outcome) for request_id, outcome in sampled.outcomes]
        await asyncio.to_thread(self._settlement.end, ended, lambda c: usage.add_sampled(c, sampled.used, sampled.runs))
        self._scheduler.finish(commands)
        for command in sampled.postponed:
            self._scheduler.add(command)
