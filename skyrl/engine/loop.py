"""The engine's loop: hear the doorbell, read new commands, run a turn, write what came out, ring the API.

Knows the order of things. What to run next is the scheduler's, how to run it the backend's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from skyrl.backends.base import Backend
from skyrl.config.server import ServerConfig
from skyrl.db import futures as rows
from skyrl.db import usage
from skyrl.db.fence import Displaced, FencedDatabase
from skyrl.db.futures import Outcome
from skyrl.db.models import living_among
from skyrl.db.periodic import repeat
from skyrl.engine.barriers import Barriers
from skyrl.engine.commands import Command, command_of
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.execution import Execution
from skyrl.engine.reclaim import FileSweeper, end_sessions
from skyrl.engine.sampling import ColocatedSampler
from skyrl.engine.scheduler import FILES_AT_ONCE, Scheduler, cost_of
from skyrl.engine.snapshots import Snapshots
from skyrl.inference.adapter_host import AdapterMissing
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.vllm_client import VllmError
from skyrl.notify.doorbell import SESSIONS, Doorbell
from skyrl.storage.base import CheckpointStore, StoreError
from skyrl.types.kinds import ENGINE_KINDS, Kind
from skyrl.types.weights import AdapterVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")

SAFETY_POLL_S = 2.0
"""How often the engine looks for commands and ended sessions whose ring was lost."""
SWEEP_S = 10.0
BYTES_PER_TOKEN = 20
"""A training token on the wire: 4 bytes of input, 8 of target, 4 each of logprob and advantage."""
OnThread = Callable[[Callable[[], Outcome | None]], Awaitable[Outcome | None]]


class Engine:
    """Runs commands until `stop`. `sampler` serves SAMPLE commands and is None when samples are forwarded."""

    def __init__(
        self,
        config: ServerConfig,
        database: FencedDatabase,
        backend: Backend,
        group: EngineGroup | None,
        api: Doorbell,
        sampler: ColocatedSampler | None,
        snapshots: Snapshots,
        store: CheckpointStore,
        ledger: CrashLedger,
    ) -> None:
        self._database = database
        self._backend = backend
        self._group = group
        self._api = api
        self._snapshots = snapshots
        self._sampler = sampler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backend")
        self._files = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="files")
        # Twice the micro-batch: enough to fill it, and short enough that every model's turn comes soon.
        self.scheduler = Scheduler(2 * config.backend_config.trainer.micro_batch_tokens * BYTES_PER_TOKEN)
        self.execution = Execution(
            database,
            backend,
            Barriers(config, database, backend, store, self.wait_for_backend),
            snapshots,
            ledger,
            api,
            self.wait_for_backend,
            self._publish_adapter,
            self.scheduler.next_seq,
        )
        self._sweeper = FileSweeper(config, database, store, database.confirm_claim)
        self._bell = asyncio.Event()
        self._arrived = asyncio.Event()
        self._unread = True
        """Whether something may have arrived since the log was last read."""
        self._reading = asyncio.Lock()
        self._file_commands: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        """What a save or a load died of: no outcome of its own, but an engine that cannot go on."""
        self._stopping = False
        self._look_due = 0.0
        self._loop = asyncio.get_running_loop()

    def ring(self, words: Sequence[str] = ()) -> None:
        if SESSIONS in words:
            self._look_due = 0.0
        self._unread = True
        self._arrived.set()
        self._bell.set()

    def stop(self) -> None:
        """End after the turn that is running."""
        self._stopping = True
        self._bell.set()

    @property
    def ends(self) -> bool:
        """Whether it begins no turn any more: it was told to stop, or has failed."""
        return self._stopping

    async def run(self) -> None:
        sweeping = asyncio.create_task(repeat("sweeping unused files", SWEEP_S, self._sweep))
        listening = asyncio.create_task(self._listen())
        try:
            while not self._stopping:
                if self._failure is not None:
                    raise self._failure
                self._bell.clear()
                if time.monotonic() >= self._look_due:
                    self._look_due = time.monotonic() + SAFETY_POLL_S
                    self._unread = True
                    await self._end_sessions()
                await self._read_log()
                await self._snapshot_overdue()
                self.scheduler.hold_samples(self._sampler is not None and not self._sampler.may_run)
                if self.scheduler.has_work:
                    await self._turn()
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_s()):
                        await self._bell.wait()
        finally:
            self._stopping = True
            sweeping.cancel()
            listening.cancel()
            await asyncio.gather(sweeping, listening, *self._file_commands, return_exceptions=True)
            for threads in (self._thread, self._files):  # what they run may take long
                await asyncio.to_thread(threads.shutdown)

    def _idle_s(self) -> float:
        """How long there is nothing to do but to listen."""
        start = self.scheduler.next_start
        idle_s = self._look_due - time.monotonic()
        return idle_s if start is None else min(idle_s, max(0.0, start - time.time()))

    async def on_backend(self, work: Callable[[], T]) -> T:
        """Run on the one thread that touches the backend."""
        return await self._loop.run_in_executor(self._thread, work)

    async def _on_files(self, work: Callable[[], T]) -> T:
        """Beside other models' training: an RL loop's next samples wait for its save."""
        return await self._loop.run_in_executor(self._files, work)

    def wait_for_backend(self, work: Callable[[], object]) -> None:
        """`on_backend` for the threads of saves and loads."""
        self._thread.submit(work).result()

    async def _listen(self) -> None:
        """Hear what arrives during a turn: a save or a load need not wait for it."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                await self._read_log()
            except SQLAlchemyError:
                logger.exception("new commands could not be read; the next turn tries again")

    async def _read_log(self) -> None:
        """Queue what has arrived since this was last done, and start the saves and loads whose turn it is."""
        async with self._reading:
            if self._unread:
                self._unread = False
                try:
                    await self._queue_new()
                except BaseException:
                    self._unread = True
                    raise
        self.scheduler.start_due(time.time())
        for command in self.scheduler.take_file_commands():
            task = asyncio.create_task(self._run_barrier(command, self._on_files))
            self._file_commands.add(task)
            task.add_done_callback(self._file_command_ended)

    def _file_command_ended(self, task: asyncio.Task[None]) -> None:
        self._file_commands.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()
        self._arrived.set()  # what comes after it in its model's order may run now
        self._bell.set()

    async def _queue_new(self) -> None:
        """Queue what has arrived. Commands of a model that is closed or has failed fail at once."""
        last_row, known = self.scheduler.last_row, self.scheduler.model_ids

        def read(connection: Connection) -> tuple[list[Command], set[str]]:
            new = [command_of(row) for row in rows.pending(connection, sorted(ENGINE_KINDS), last_row)]
            unknown = {c.model_id for c in new if c.model_id is not None} - known
            return new, unknown - living_among(connection, unknown)

        new, gone = await self._database.read_async(read)
        await self._refuse([command for command in new if command.model_id in gone])
        for command in new:  # not before: what is queued says up to where the log has been read
            if command.model_id not in gone:
                self.scheduler.add(command)

    async def _refuse(self, commands: Sequence[Command]) -> None:
        if commands:
            await asyncio.to_thread(self.execution.refuse, commands)

    async def _turn(self) -> None:
        """A share of the commands that are next, then of the samples that wait.

        Where the backend gains nothing from running models together, a share is of one model: alternating command by
        command would finish all tenants at the same late moment, and they would march in step ever after, all training
        and then all sampling (docs/decisions/shares.md).
        """
        ready = self.scheduler.ready_models()
        if self._backend.merges_passes:
            await self._run_share(ready)
        else:
            spent = 0
            while spent < self.scheduler.budget and (cost := await self._run_share(ready[:1])):
                spent += cost
        if samples := self.scheduler.take_samples():
            await self._run_samples(samples)

    async def _run_share(self, model_ids: Sequence[str]) -> int:
        """Passes of these models, then one barrier of each; what that cost, in the scheduler's bytes."""
        passes = self.scheduler.take_passes(model_ids)
        if passes:
            await self.on_backend(lambda: self.execution.passes(passes))
            self.scheduler.finish(passes)
        await self._read_log()
        barriers = self.scheduler.take_barriers(model_ids)
        for command in barriers:
            await self._run_barrier(command, self.on_backend)
        return sum(cost_of(command) for command in (*passes, *barriers))

    async def _run_barrier(self, command: Command, on_thread: OnThread) -> None:
        outcome = await on_thread(lambda: self.execution.barrier(command))
        if outcome is not None and command.model_id is not None:
            if outcome.error is None and command.kind is Kind.UNLOAD_MODEL:
                await self._forget_model(command.model_id)
            elif outcome.error is not None and command.seq_id == 0:
                await self.close_queue(command.model_id)
        self.scheduler.finish([command])

    async def close_queue(self, model_id: str) -> None:
        """Of a model that has failed or is closed: what is queued fails, also what waits for a missing number."""
        async with self._reading:  # what is just being read may be this model's
            left = self.scheduler.close_model(model_id)
        await self._refuse(left)

    def _publish_adapter(self, adapter: AdapterVersion) -> None:
        """From a save's thread. If an inference server is away, a sample that needs the adapter loads it later."""
        if self._group is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._group.publish_adapter(adapter), self._loop).result()
        except (httpx.TransportError, VllmError, AdapterMissing, StoreError) as error:
            logger.warning("adapter %s was saved but not loaded yet: %s", adapter.name, error)

    async def _run_samples(self, commands: list[Command]) -> None:
        if self._sampler is None:
            gone = Outcome(error="this server forwards samples; send the sample again", error_category="server")
            await asyncio.to_thread(self.execution.settle, [(command.request_id, gone) for command in commands])
            self.scheduler.finish(commands)
            return
        ids = [command.request_id for command in commands]
        bodies = await self._database.read_async(lambda c: rows.bodies(c, ids, pending=True))  # some were cancelled
        sampled = await self._sampler.run(commands, bodies)
        await asyncio.to_thread(self.execution.settle, sampled.outcomes, lambda c: usage.add(c, sampled.used))
        self.scheduler.finish(commands)
        for command in sampled.left:
            self.scheduler.add(command)

    async def _snapshot_overdue(self) -> None:
        """Between two turns, of models that do not step."""
        for model_id in self._snapshots.overdue():
            if model_id not in self.scheduler:
                self._snapshots.disregard(model_id)
            elif not self.scheduler.is_busy(model_id):
                self.scheduler.hold(model_id)
                await self.on_backend(lambda model_id=model_id: self.execution.snapshot_overdue(model_id))
                self.scheduler.release(model_id)

    async def _end_sessions(self) -> None:
        ended = await asyncio.to_thread(end_sessions, self._database)
        for model_id in ended.model_ids:
            await self._forget_model(model_id)
        if ended.request_ids:
            self._api.ring(ended.request_ids)

    async def _forget_model(self, model_id: str) -> None:
        """Of a model whose row is closed."""

        def forget() -> None:
            self._backend.delete_model(model_id)
            self._snapshots.forget(model_id)

        await self.close_queue(model_id)
        await self.on_backend(forget)

    async def _sweep(self) -> None:
        try:
            await self._sweep_files()
        except Displaced as error:
            self._failure = self._failure or error
            self._bell.set()

    async def _sweep_files(self) -> None:
        await asyncio.to_thread(self._sweeper.drop_idle)
        for adapter in await asyncio.to_thread(self._sweeper.unused_adapters, self.scheduler.saving):
            if self._group is not None:
                try:
                    await self._group.retire_adapter(adapter.name)
                except VllmError as error:
                    logger.warning("adapter %s could not be unloaded yet: %s", adapter.name, error)
                    continue
                except httpx.TransportError as error:  # each of the others would wait as long
                    logger.warning("adapters could not be unloaded yet: %s", error or type(error).__name__)
                    break
            self._sweeper.unloaded(adapter)
        await asyncio.to_thread(self._sweeper.delete_files, self.scheduler.saving)
