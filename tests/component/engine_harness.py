"""The engine of its process, run inside the test: real loop, real torch backend, real SQLite, no vLLM. Commands are
recorded as the API records them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.base.tiny import model_path
from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.types.weights import AdapterVersion, LoraSpec, RankPattern, WeightsRef
from skyrl.base.wire.paths import model_id_of
from skyrl.base.wire.results import to_json
from skyrl.engine.build import EngineParts, build_engine, held_versions
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.loop import Engine
from skyrl.engine.recovery import Recovery
from skyrl.engine.scheduler import Scheduler
from skyrl.engine.telemetry import CommandTracing
from skyrl.engine.threads import EngineSignals, EngineThreads
from skyrl.inference.engine_group import EngineGroup
from skyrl.storage.checkpoint_store.base import MANIFEST, NotStored
from skyrl.storage.checkpoint_store.directories import is_scratch, safe_name, subdirectories
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database, Fence, FencedDatabase
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.models import Model, add_model, models
from skyrl.storage.db.sessions import Session, Sessions
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.doorbell import SESSIONS, Doorbell, DoorbellListener
from skyrl.storage.futures.store import FutureStore
from skyrl.trainer import create_backend
from tests.databases import make_tables
from tests.engine_process import claim_for_tests

SERVER = "server"
"""The server name under which the engine's claim is held."""
WAIT_S = 100.0
NEVER_S = 1e9


class Killed(BaseException):
    """The engine dies at this point, as if by SIGKILL: nothing after this point happens."""


def data(seed: int, *lengths: int) -> list[dict[str, Any]]:
    """Random next-token data for the tiny model, as JSON datums."""
    rng = np.random.default_rng(seed)
    datums = []
    for length in lengths or (12,):
        text = rng.integers(0, 512, length + 1).tolist()
        weights = rng.choice([0.0, 1.0, 0.5], length).tolist()
        inputs = {
            "target_tokens": {"data": text[1:], "dtype": "int64", "shape": [length]},
            "weights": {"data": weights, "dtype": "float32", "shape": [length]},
        }
        datums.append({"model_input": {"chunks": [{"tokens": text[:-1]}]}, "loss_fn_inputs": inputs})
    return datums


async def until(condition: Callable[[], bool]) -> None:
    """Wait for an effect that the engine produces after its answer and does not announce."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.002)


async def asleep(signals: EngineSignals) -> None:
    """Wait until the engine's loop has ended its turn, and the loop and its listener wait for a ring."""
    for event in (signals.work, signals.arrived):
        await until(lambda event=event: not event.is_set() and any(not waiting.done() for waiting in event._waiters))


class Models:
    """Adds only the rows of models, for tests that send the CREATE_MODEL command themselves, late or never."""

    def __init__(self, _: Database, writer: GroupCommitWriter) -> None:
        self._writer = writer

    async def create(self, model: Model, model_seq_id: int) -> None:
        await self._writer.transact(add_model(model, model_seq_id))


def files_in(directory: Path | str | None) -> dict[str, bytes]:
    """File names and contents; empty if the directory does not exist."""
    path = Path(directory or "/nowhere")
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else {}


class Harness:
    """One state directory and, between `start` and `stop` or `kill`, an engine on it: with `base_models`, that of the
    base model `number`."""

    def __init__(self, state_dir: Path, *, number: int = 0, **flags: Any) -> None:
        flags = {"snapshot_interval_s": NEVER_S, **flags}
        if "base_models" not in flags:
            flags = {"base_model": str(model_path()), **flags}
        self.config = base_models_of(load_config({"state_dir": state_dir, **flags}))[number]
        self.database = Database(self.config.database)
        make_tables(self.database)
        self.engine_database = FencedDatabase(self.config.database, Fence(SERVER))
        self.writer = GroupCommitWriter(self.database)
        self.store = FutureStore(self.database, self.writer)
        self.checkpoint_store = open_store(self.config)
        self.sessions = Sessions(self.database, self.writer)
        self.models = Models(self.database, self.writer)
        # The path of a socket must be short; pytest's paths may be long.
        self._sockets = tempfile.TemporaryDirectory(prefix="skyrl-test-")
        self._doorbell = Path(self._sockets.name) / "api.sock"
        self._ringing: set[asyncio.Task[list[str]]] = set()
        self._listener = DoorbellListener(self._doorbell, self._on_ring)
        self._listener.start()
        self.make_backend: Callable[[ServerConfig], Any] = lambda config: create_backend(config)
        self._parts: EngineParts | None = None
        self._running: asyncio.Task[None] | None = None
        self._api: Doorbell | None = None
        self._ledger: CrashLedger | None = None

    def _on_ring(self, words: list[str]) -> None:
        task = asyncio.create_task(self.store.read_outcomes(words))
        self._ringing.add(task)
        task.add_done_callback(self._ringing.discard)

    @property
    def base_model(self) -> str:
        """The name of its base model in the rows of models."""
        return self.config.served_names[0] if self.config.role.name else "tiny"

    @property
    def parts(self) -> EngineParts:
        assert self._parts is not None
        return self._parts

    @property
    def is_running(self) -> bool:
        return self._parts is not None

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    @property
    def recovery(self) -> Recovery:
        return self.parts.recovery

    @property
    def scheduler(self) -> Scheduler:
        return self.parts.scheduler

    @property
    def threads(self) -> EngineThreads:
        return self.parts.threads

    async def sweep(self) -> None:
        """Run one sweep of unused files. A sweep spares models with a running save, and a save still runs for a moment
        after its outcome is stored."""
        await until(lambda: not self.scheduler.saving)
        await self.parts.sweep.once()

    async def start(
        self,
        prepare: Callable[[Harness], object] = lambda _: None,
        *,
        group: EngineGroup | None = None,
        sampler: ColocatedSampler | None = None,
        run: Callable[[EngineParts], Coroutine[Any, Any, None]] = lambda parts: parts.engine.run(),
        tracing: CommandTracing | None = None,
    ) -> None:
        """Start a new backend and a new engine, and recover from the state directory. Without a group there is no vLLM;
        with a sampler the engine runs samples itself. `run` runs the engine; the engine process also retries failed
        restorations."""
        claim_for_tests(self.database, SERVER)
        self.backend: Any = self.make_backend(self.config)
        self._api = Doorbell(self._doorbell)
        self._ledger = CrashLedger(self.config.running_file)
        self._parts = build_engine(
            self.config,
            self.engine_database,
            self.backend,
            self.checkpoint_store,
            self._ledger,
            self._api,
            EngineSignals(),
            group,
            sampler,
            tracing=tracing,
        )
        self.snapshots = self._parts.snapshots
        prepare(self)
        await self.recovery.run()
        self._running = asyncio.create_task(run(self.parts))

    async def stop(self) -> None:
        if self._running is None:
            return
        self.parts.signals.stop()
        await self._running
        self._clear_engine()

    async def crash(self) -> None:
        """End the engine without its last snapshots, as a death does. Every outcome is committed."""
        if self._running is not None:
            self.parts.signals.fail(Killed())
            with contextlib.suppress(Killed):
                await self._running
            self._clear_engine()

    def kill_before_commit_of(self, wanted: Callable[[str], bool]) -> None:
        """Let the engine execute the command whose request id is `wanted`, and die before it stores the outcome."""
        settle = self.parts.settlement.settle

        def settle_or_die(outcomes: Any, *rest: Any, **options: Any) -> None:
            if any(wanted(request_id) for request_id, _ in outcomes):
                raise Killed
            settle(outcomes, *rest, **options)

        self.parts.settlement.settle = settle_or_die  # type: ignore[method-assign]

    async def wait_until_killed(self, by: type[BaseException] = Killed) -> None:
        """Wait until the engine has died, by the armed death or by an exception of the type `by`."""
        assert self._running is not None
        with contextlib.suppress(by):
            await asyncio.wait_for(self._running, WAIT_S)
            raise AssertionError("the engine has ended by itself")
        self._clear_engine()

    def close_after_failed_start(self) -> None:
        """After a `start` that has raised: close what was opened, as the end of a process does."""
        self.parts.signals.stop()
        self._clear_engine()

    def _clear_engine(self) -> None:
        assert self._api is not None
        assert self._ledger is not None
        self._api.close()
        self._ledger.close()
        self._running = self._parts = None

    async def close(self) -> None:
        await self.crash()
        self._listener.close()
        await asyncio.gather(*self._ringing)
        await self.writer.close()
        self.engine_database.close()
        self.database.close()
        self._sockets.cleanup()
        held = held_versions(self.config, self.checkpoint_store)
        shutil.rmtree(held._memory, ignore_errors=True)  # of an engine that the test has killed

    async def outcome(self, request_id: str, tenant: str = "tenant") -> Outcome:
        outcome = await self.store.wait(request_id, tenant, WAIT_S)
        assert outcome is not None, "the command has not ended"
        return outcome

    async def queued(self, count: int) -> None:
        """Wait until the engine has read `count` commands that it cannot run yet."""
        await until(lambda: self.scheduler.waiting >= count)

    def model_row(self, model_id: str) -> Any:
        return self.database.read(lambda c: c.execute(select(models).where(models.c.id == model_id)).one())

    def adapter(self, weights: WeightsRef) -> Path:
        """The directory of an adapter version."""
        assert isinstance(weights, AdapterVersion)
        return version_directory(self.config.state_dir, weights)

    def versions(self, model_id: str) -> list[Path]:
        """The directories of a model's adapter versions, in order: not those of a copy to the disk, which goes on after
        an unnamed save is answered."""
        directory = self.config.adapters_dir / safe_name(model_id)
        return [path for path in subdirectories(directory) if not is_scratch(path)]

    async def copied(self) -> None:
        """Wait until what unnamed saves hold in memory is on the disk."""
        adapters = self.config.adapters_dir
        await until(lambda: not any(is_scratch(path) or path.is_symlink() for path in adapters.glob("*/**/*")))

    def checkpoint_rows(self, model_id: str) -> list[Any]:
        query = select(checkpoints).where(checkpoints.c.model_id == model_id).order_by(checkpoints.c.name)
        return self.database.read(lambda c: list(c.execute(query)))

    def stored(self, row: Any) -> dict[str, bytes]:
        """Names and contents of a checkpoint's files; empty if the store does not have them."""
        try:
            with self.checkpoint_store.reading(row.store_key) as directory:
                return {name: content for name, content in files_in(directory).items() if name != MANIFEST}
        except NotStored:
            return {}

    async def end(self, session: Session) -> None:
        """End the session as the API does when a client finishes; return when the engine has closed its models."""
        assert await self.sessions.end(session, "finished", None, None)
        self.store.drop_session(session.id)
        self.engine.ring([SESSIONS])
        models_of_session = select(models.c.status).where(models.c.session_id == session.id)
        await until(
            lambda: (
                set(self.database.read(lambda c: c.execute(models_of_session).scalars().all())) <= {"closed", "failed"}
            )
        )


@dataclass
class Trainer:
    """A client of one model. It sends commands, numbered in order unless a test passes a number."""

    harness: Harness
    session: Session
    model_id: str
    seq_id: int = 0
    creating: str | None = None
    """The request id of the CREATE_MODEL command, until its outcome was awaited."""

    @classmethod
    async def create(
        cls,
        harness: Harness,
        *,
        tenant: str = "tenant",
        session: Session | None = None,
        model_seq_id: int = 0,
        seed: int = 1,
        rank: int = 4,
        rank_pattern: RankPattern = (),
        value_head: bool = False,
        create: bool = True,
    ) -> Trainer:
        """A model row and, with `create`, a CREATE_MODEL command, without waiting for its outcome."""
        session = session or await harness.sessions.create(tenant, [], None, "")
        model_id = model_id_of(session.id, model_seq_id)
        lora = LoraSpec(rank, 32.0, seed, rank_pattern=rank_pattern, value_head=value_head)
        model = Model(model_id, session.id, tenant, harness.base_model, lora, None)
        await harness.models.create(model, model_seq_id)
        trainer = cls(harness, session, model_id)
        if create:
            trainer.creating = await trainer.send(Kind.CREATE_MODEL, 0)
        return trainer

    async def send(self, kind: Kind, seq_id: int | None = None, **body: Any) -> str:
        """Record a command, ring the engine, and return the request id."""
        if seq_id is None:
            self.seq_id += 1
            seq_id = self.seq_id
        text = json.dumps({"model_id": self.model_id, "seq_id": seq_id, **body}).encode()
        request = NewRequest(kind, self.session.tenant, self.session.id, text, model_id=self.model_id, seq_id=seq_id)
        request_id, _ = await self.harness.store.record(request)
        if self.harness.is_running:
            self.harness.engine.ring()
        return request_id

    async def outcome(self, request_id: str) -> Outcome:
        return await self.harness.outcome(request_id, self.session.tenant)

    async def result(self, request_id: str) -> dict[str, Any]:
        outcome = await self.outcome(request_id)
        assert outcome.error is None, outcome.error
        return json.loads(to_json(outcome.result, outcome.result_format))

    async def do(self, kind: Kind, **body: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        return await self.result(await self.send(kind, **body))

    async def fails(self, kind: Kind, **body: Any) -> Outcome:
        """Send a command and wait for its failure."""
        outcome = await self.outcome(await self.send(kind, **body))
        assert outcome.error is not None
        return outcome

    async def forward_backward(self, seed: int, seq_id: int | None = None, *lengths: int) -> str:
        given = {"data": data(seed, *lengths), "loss_fn": "cross_entropy"}
        return await self.send(Kind.FORWARD_BACKWARD, seq_id, forward_backward_input=given)

    async def optim_step(self, seq_id: int | None = None) -> str:
        return await self.send(Kind.OPTIM_STEP, seq_id, adam_params={"learning_rate": 0.01, "grad_clip_norm": 1.0})

    async def step(self, seed: int) -> dict[str, Any]:
        """Send two chunks and a step; return the metrics of the step."""
        return (await self.result(await self.send_step(seed)))["metrics"]

    async def send_step(self, seed: int) -> str:
        """`step` without waiting; returns the request id of the optim_step."""
        await self.forward_backward(seed, None, 9, 14)
        await self.forward_backward(seed + 1000)
        return await self.optim_step()

    async def state(self) -> dict[str, bytes]:
        """Everything that the backend holds of this model, to the last bit. Waits until the model exists."""
        if self.creating is not None:
            await self.result(self.creating)
            self.creating = None

        def save() -> dict[str, bytes]:
            with tempfile.TemporaryDirectory() as directory:
                self.harness.backend.save_state(self.model_id, Path(directory))
                return files_in(directory)

        return await self.harness.threads.on_backend(save)


@contextlib.asynccontextmanager
async def harness_in(state_dir: Path, **flags: Any) -> AsyncIterator[Harness]:
    """A harness without a started engine."""
    harness = Harness(state_dir, **flags)
    try:
        yield harness
    finally:
        await harness.close()
