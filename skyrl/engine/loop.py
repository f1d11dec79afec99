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
from skyrl.background import repeat
from skyrl.config import ServerConfig
from skyrl.db import futures as rows
from skyrl.db import usage
from skyrl.db.database import Database
from skyrl.db.futures import Outcome
from skyrl.db.models import living_among, set_model
from skyrl.engine.commands import Change, Command, Done, command_of
from skyrl.engine.handlers import Barriers, model_is_gone, unloaded
from skyrl.engine.passes import failed, run_passes
from skyrl.engine.reclaim import FileSweeper, end_sessions
from skyrl.engine.recovery import Snapshots
from skyrl.engine.sampling import ColocatedSampler
from skyrl.engine.scheduler import Scheduler
from skyrl.futures.doorbell import Doorbell
from skyrl.futures.kinds import ENGINE_KINDS, SAVES, Kind
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.vllm_client import VllmError
from skyrl.storage.base import CheckpointStore
from skyrl.wire.results import encode_json

logger = logging.getLogger(__name__)
T = TypeVar("T")

SAFETY_POLL_S = 2.0
"""How often the engine looks for commands whose ring was lost."""
SWEEP_S = 10.0
BYTES_PER_TOKEN = 20
"""A training token on the wire: 4 bytes of input, 8 of target, 4 each of logprob and advantage."""
FILE_THREADS = 4
"""Saves and loads that run at once: with an object store they wait for the network."""
BARRIER_COST = 5_000
"""What a barrier counts for in a model's share: about what a pass over 250 tokens does."""
OnThread = Callable[[Callable[[], Done]], Awaitable[Done]]


class Engine:
    """Runs commands until `stop`. `sampler` serves SAMPLE commands and is None when samples are forwarded."""

    def __init__(
        self,
        config: ServerConfig,
        database: Database,
        backend: Backend,
        group: EngineGroup | None,
        api: Doorbell,
        sampler: ColocatedSampler | None,
        snapshots: Snapshots,
        store: CheckpointStore,
    ) -> None:
        self._snapshots = snapshots
        self._database = database
        self._backend = backend
        self._group = group
        self._api = api
        self._sampler = sampler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backend")
        self._files = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="files")
        self._barriers = Barriers(config, database, backend, store, lambda work: self._thread.submit(work).result())
        self._sweeper = FileSweeper(config, database, store)
        # Twice the micro-batch: enough to fill it, and short enough that every model's turn comes soon.
        self.scheduler = Scheduler(2 * config.backend_config.trainer.micro_batch_tokens * BYTES_PER_TOKEN)
        self._bell = asyncio.Event()
        self._arrived = asyncio.Event()
        self._reading = asyncio.Lock()
        self._beside: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        """What a save or a load died of: no outcome of its own, but an engine that cannot go on."""
        self._stopping = False
        self._sessions_due = 0.0

    def ring(self, _words: Sequence[str] = ()) -> None:
        self._arrived.set()
        self._bell.set()

    def stop(self) -> None:
        """End after the turn that is running."""
        self._stopping = True
        self._bell.set()

    async def run(self) -> None:
        sweeping = asyncio.create_task(repeat("sweeping unused files", SWEEP_S, self._sweep))
        listening = asyncio.create_task(self._listen())
        try:
            while not self._stopping:
                if self._failure is not None:
                    raise self._failure
                self._bell.clear()
                await self._read_log()
                if not self.scheduler.has_work or time.monotonic() >= self._sessions_due:
                    await self._end_sessions()
                if self.scheduler.has_work:
                    await self._turn()
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAFETY_POLL_S):
                        await self._bell.wait()
        finally:
            sweeping.cancel()
            listening.cancel()
            await asyncio.gather(sweeping, listening, *self._beside, return_exceptions=True)
            self._thread.shutdown()
            self._files.shutdown()

    async def on_backend(self, work: Callable[[], T]) -> T:
        """Run on the one thread that touches the backend."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

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
        """Queue what has arrived, and start the saves and loads whose turn it is."""
        async with self._reading:
            await self._queue_new()
        for command in self.scheduler.take_beside():
            task = asyncio.create_task(self._run_barrier(command, self._on_files))
            self._beside.add(task)
            task.add_done_callback(self._beside_ended)

    async def _on_files(self, work: Callable[[], T]) -> T:
        """Beside other models' training: an RL loop's next samples wait for its save."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    def _beside_ended(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()
        self.ring()  # what comes after it in its model's order may run now

    async def _queue_new(self) -> None:
        """Queue what has arrived. Commands of a model that is closed or has failed fail at once."""

        def read(connection: Connection) -> tuple[list[Command], set[str]]:
            rows_after = rows.pending(connection, sorted(ENGINE_KINDS), self.scheduler.last_row)
            new = [command_of(row) for row in rows_after]
            unknown = {c.model_id for c in new if c.model_id is not None and c.model_id not in self.scheduler}
            return new, unknown - living_among(connection, unknown)

        new, gone = await self._database.read_async(read)
        for command in new:
            if command.model_id not in gone:
                self.scheduler.add(command)
        await self._refuse([command for command in new if command.model_id in gone])

    async def _refuse(self, commands: Sequence[Command]) -> None:
        """Commands of a model that is gone fail, but for those that wanted just that."""

        def outcome(command: Command) -> Outcome:
            if command.kind is Kind.UNLOAD_MODEL:
                return Outcome(encode_json(unloaded(command.model_id)))
            return failed(model_is_gone(command), command)

        if commands:
            await self._settle([(command.request_id, outcome(command)) for command in commands])

    async def _turn(self) -> None:
        """A share of every ready model's commands, then the samples that wait.

        Where the backend gains nothing from running models together, a model's whole share comes before the next
        model's: alternating command by command would finish all tenants at the same late moment, and they would march
        in step ever after, all training and then all sampling (docs/decisions/shares.md).
        """
        ready = self.scheduler.ready_models()
        if self._backend.merges_passes:
            await self._run_share(ready)
        else:
            for model_id in ready:
                spent = 0
                while spent < self.scheduler.budget and (cost := await self._run_share([model_id])):
                    spent += cost
        if samples := self.scheduler.take_samples():
            await self._run_samples(samples)

    async def _run_share(self, model_ids: Sequence[str]) -> int:
        """Passes of these models, then one barrier of each; what that cost, in the scheduler's bytes."""
        passes = self.scheduler.take_passes(model_ids)
        if passes:
            await self._run_passes(passes)
        await self._read_log()
        barriers = self.scheduler.take_barriers(model_ids)
        for command in barriers:
            await self._run_barrier(command)
        return sum(command.size for command in passes) + BARRIER_COST * len(barriers)

    async def _bodies(self, commands: Sequence[Command]) -> dict[str, bytes]:
        ids = [command.request_id for command in commands]
        return await self._database.read_async(lambda c: rows.bodies(c, ids))

    async def _run_passes(self, commands: list[Command]) -> None:
        bodies = await self._bodies(commands)
        here = [command for command in commands if command.request_id in bodies]
        started = time.perf_counter()
        ran = await self.on_backend(lambda: run_passes(here, bodies, self._backend))
        logger.debug("%d passes in %.1f ms", len(here), (time.perf_counter() - started) * 1e3)
        outcomes = [(command.request_id, outcome) for command, outcome in ran.outcomes]
        await self._settle(outcomes, lambda connection: usage.count_training(connection, ran.tokens))
        self.scheduler.finish(commands)

    async def _run_barrier(self, command: Command, on_thread: OnThread | None = None) -> None:
        bodies = await self._bodies([command])
        if command.request_id in bodies:
            await self._run_taken(command, bodies[command.request_id], on_thread or self.on_backend)
        self.scheduler.finish([command])

    async def _run_taken(self, command: Command, body: bytes, on_thread: OnThread) -> None:
        change: Change | None = None
        try:
            done = await on_thread(lambda: self._barriers.run(command, body))
            outcome = Outcome(encode_json(done.result))
            change = done.change
            await self._publish_adapter(done)
        except Exception as error:
            outcome, change = failed(error, command), None
            if command.seq_id == 0 and command.model_id is not None:
                change = set_model(command.model_id, status="failed")
        await self._settle([(command.request_id, outcome)], change, power_safe=command.kind in SAVES)
        if outcome.error is None and command.kind is Kind.UNLOAD_MODEL and command.model_id is not None:
            await self._forget_model(command.model_id)
        elif outcome.error is None:
            await self._snapshot(command)
        elif command.seq_id == 0 and command.model_id is not None:
            await self._close_queue(command.model_id)

    async def _close_queue(self, model_id: str) -> None:
        """Of a model that has failed or is closed: what is queued fails, also what waits for a missing number."""
        async with self._reading:  # what is just being read may be this model's
            left = self.scheduler.close_model(model_id)
        await self._refuse(left)

    async def _snapshot(self, command: Command) -> None:
        """After a step or a load. One that fails costs time after a crash, and nothing now."""
        take = {Kind.OPTIM_STEP: self._snapshots.after_step, Kind.LOAD_WEIGHTS: self._snapshots.take}.get(command.kind)
        if take is None or command.model_id is None or command.seq_id is None:
            return
        model_id, next_seq = command.model_id, command.seq_id + 1
        try:
            await self.on_backend(lambda: take(model_id, next_seq))
        except Exception:
            logger.exception("model %s has no snapshot at command %d", model_id, next_seq)

    async def _publish_adapter(self, done: Done) -> None:
        """Tell the inference servers of a new adapter. If one is away, a sample that needs it loads it later."""
        if done.adapter is None or self._group is None:
            return
        name, directory = done.adapter
        try:
            await self._group.publish_adapter(name, directory)
        except (httpx.TransportError, VllmError) as error:
            logger.warning("adapter %s was saved but not loaded yet: %s", name, error)

    async def _run_samples(self, commands: list[Command]) -> None:
        if self._sampler is None:
            gone = Outcome(error="this server forwards samples; send the sample again", error_category="server")
            await self._settle([(command.request_id, gone) for command in commands])
            self.scheduler.finish(commands)
            return
        ids = [command.request_id for command in commands]
        bodies = await self._database.read_async(lambda c: rows.bodies(c, ids, pending=True))  # some were cancelled
        sampled = await self._sampler.run(commands, bodies)
        await self._settle(sampled.outcomes, lambda connection: usage.add(connection, sampled.used))
        self.scheduler.finish(commands)

    async def _settle(
        self,
        outcomes: Sequence[tuple[str, Outcome]],
        change: Change | None = None,
        *,
        power_safe: bool = False,
    ) -> None:
        """Write outcomes (and what belongs with them) in one transaction, then tell the API."""
        now = time.time()

        def write(connection: Connection) -> None:
            if change is not None:
                change(connection)
            if outcomes:
                connection.execute(rows.SETTLE, [rows.settlement(request_id, o, now) for request_id, o in outcomes])

        await asyncio.to_thread(self._database.write, write, power_safe=power_safe)
        self._api.ring([request_id for request_id, _ in outcomes])

    async def _end_sessions(self) -> None:
        self._sessions_due = time.monotonic() + SAFETY_POLL_S
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

        await self._close_queue(model_id)
        await self.on_backend(forget)

    async def _sweep(self) -> None:
        for name, path in await asyncio.to_thread(self._sweeper.unused_adapters, self.scheduler.saving):
            if self._group is not None:
                try:
                    await self._group.retire_adapter(name)
                except (httpx.TransportError, VllmError) as error:
                    logger.warning("adapter %s could not be unloaded yet: %s", name, error)
                    continue
            self._sweeper.unloaded(path)
        await asyncio.to_thread(self._sweeper.delete_files, self.scheduler.saving)
