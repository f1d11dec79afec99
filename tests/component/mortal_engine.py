"""An engine that dies at any instruction a test chooses, on a backend whose models record their history.

All other parts are real: store, writer, database, scheduler, execution, snapshots, recovery, checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from engine_harness import SERVER, WAIT_S, Killed, until
from sqlalchemy import Connection

from skyrl.base.adapter_files import Target
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import LoraSpec
from skyrl.engine.build import EngineParts, build_engine
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.threads import EngineSignals
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db.database import Database, Fence, FencedDatabase
from skyrl.storage.doorbell import SESSIONS
from skyrl.trainer.protocol import AdamParams, InvalidRequest, ModelLimits, PassResult, TrainingPass
from tests.engine_process import claim_for_tests

ALL = 1000
"""A number of turns that is enough for all work."""
REFUSED, NOT_FINITE = 500, 400
"""Two tokens: the backend refuses the first, and the second makes the gradient not finite."""

State = dict[str, list[Any]]
"""`done`: steps and loads; `gradient`: the passes since the last step."""


def fresh() -> State:
    return {"done": [], "gradient": []}


def weight(state: State) -> float:
    """A number that differs for any two histories of a model, exact in float32."""
    value = 1
    for letter in json.dumps(state):
        value = (value * 31 + ord(letter)) % 8_388_593
    return float(value)


def add_pass(state: State, token: int) -> PassResult:
    """Apply a pass to a model; returns its result. Raises InvalidRequest for a bad token, and leaves the model
    unchanged."""
    if token == REFUSED:
        raise InvalidRequest("data[0]: token 500 is refused")
    state["gradient"].append(token)
    logprobs = [np.asarray([weight(state)], np.float32)]
    return PassResult(logprobs, {"passes:sum": float(len(state["gradient"]))})


def add_step(state: State, learning_rate: float) -> dict[str, float]:
    """Apply a step. Raises FloatingPointError if the gradient is not finite, and drops the gradient."""
    gradient, state["gradient"] = state["gradient"], []
    if NOT_FINITE in gradient:
        raise FloatingPointError("the gradient is not finite")
    state["done"].append([learning_rate, *gradient])
    return {"weight": weight(state)}


class HistoryBackend:
    """A backend that calls `step()` before and after every operation."""

    limits = ModelLimits(vocab_size=512, max_context=16)
    repeats_exactly = True
    micro_batch_tokens = 4096

    def __init__(self, step: Callable[[], None], *, merges_passes: bool) -> None:
        self.merges_passes = merges_passes
        self.models: dict[str, State] = {}
        self.saving = 0
        self.saves_may_go = threading.Event()
        self.saves_may_go.set()
        self._step = step

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        self._step()
        self.models[model_id] = fresh()
        self._step()

    def layers_of(self, spec: LoraSpec) -> tuple[Target, ...]:
        raise NotImplementedError  # no sampler is compared with it, and nobody uploads to it

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        raise NotImplementedError

    def delete_model(self, model_id: str) -> None:
        self.models.pop(model_id, None)

    def check(self, training_pass: TrainingPass) -> None:
        pass

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        results: list[PassResult | Exception] = []
        for each in passes:
            self._step()
            try:
                results.append(add_pass(self.models[each.model_id], int(each.data[0].tokens[0])))
            except InvalidRequest as error:
                results.append(error)
        self._step()
        return results

    def yield_to(self, others: Callable[[], None]) -> None:
        pass

    def check_step(self, params: AdamParams) -> None:
        pass

    def clear_gradient(self, model_id: str) -> None:
        self._step()
        self.models[model_id]["gradient"] = []
        self._step()

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        self._step()
        metrics = add_step(self.models[model_id], params.learning_rate)
        self._step()
        return metrics

    def save_state(self, model_id: str, directory: Path) -> None:
        text = json.dumps(self.models[model_id])
        self.saving += 1
        assert self.saves_may_go.wait(WAIT_S)
        self._step()
        (directory / "state.json").write_text(text[: len(text) // 2])
        self._step()
        (directory / "state.json").write_text(text)
        self._step()

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._step()
        self.models[model_id] = json.loads((directory / "state.json").read_text())
        self._step()

    def save_adapter(self, model_id: str, directory: Path, *, dtype: str | None = None) -> None:
        self.save_state(model_id, directory)

    def save_snapshot(self, model_id: str, directory: Path) -> None:
        """Write two shards, each in its own folder, as two ranks would."""
        text = json.dumps(self.models[model_id])
        half = len(text) // 2
        for rank, shard in enumerate((text[:half], text[half:])):
            self._step()
            folder = directory / f"rank{rank}"
            folder.mkdir()
            (folder / "shard").write_text(shard)
        self._step()

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        self._step()
        self.models[model_id] = json.loads("".join((directory / f"rank{n}" / "shard").read_text() for n in (0, 1)))
        self._step()

    def close(self) -> None:
        self.models.clear()


class _DyingDatabase(FencedDatabase):
    """An engine may die before a write, between its changes and the commit, and after the commit."""

    def __init__(self, url: str, step: Callable[[], None]) -> None:
        super().__init__(url, Fence(SERVER))
        self._step = step

    def write(self, change: Callable[[Connection], Any], *, power_safe: bool = False) -> Any:
        def change_or_die(connection: Connection) -> Any:
            changed = change(connection)
            self._step()
            return changed

        self._step()
        written = super().write(change_or_die, power_safe=power_safe)
        self._step()
        return written


class _LossyRings:
    """Rings the API; while `are_lost` is set, rings are lost."""

    def __init__(self, on_ring: Callable[[list[str]], None]) -> None:
        self.are_lost = False
        self._on_ring = on_ring
        self._loop = asyncio.get_running_loop()

    def ring(self, words: Iterable[str] = ()) -> None:
        if not self.are_lost:
            self._loop.call_soon_threadsafe(self._on_ring, list(words))


class _LedgerUntilDeath(CrashLedger):
    """A command that begins after the death was not running at the death, so it is not recorded."""

    def __init__(self, file: Path, dead: Callable[[], bool]) -> None:
        self._dead = dead
        super().__init__(file)

    def _write(self) -> None:
        if not self._dead():
            super()._write()


class _SteppedEngine:
    """An engine that waits before each turn until the test allows the turn."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._turn, parts.engine._turn = parts.engine._turn, self._turn_when_allowed  # type: ignore[method-assign]
        self._turns_left = 0
        self._go = asyncio.Event()
        self._is_waiting = self._in_turn = False
        self.gaps = parts.log._gaps
        self.ring, self.run, self.stop = parts.engine.ring, parts.engine.run, parts.signals.stop

    def allow_turns(self, turns: int) -> None:
        self._turns_left, self._is_waiting = turns, False
        self._go.set()

    def halt(self) -> None:
        self._turns_left = 0

    def die(self) -> None:
        """End the engine, wherever it is."""
        self._parts.signals.fail(Killed())
        self.allow_turns(1)
        self.ring()

    async def _turn_when_allowed(self) -> None:
        while not self._turns_left:
            self._go.clear()
            self._is_waiting = True
            await self._go.wait()
        self._turns_left -= 1
        self._in_turn = True
        await self._turn()
        self._in_turn = False

    @property
    def idle(self) -> bool:
        """Whether the engine waits: for the test's permission, or for a ring."""
        parts, signals, log = self._parts, self._parts.signals, self._parts.log
        waits = self._is_waiting or not (self._in_turn or parts.scheduler.has_work or signals.work.is_set())
        reads = log._has_news or log._reading.locked() or signals.arrived.is_set()
        return waits and not (reads or parts.file_commands.running)


class MortalEngine:
    """The engine of one state directory, through deaths and restarts."""

    def __init__(self, config: ServerConfig, on_ring: Callable[[list[str]], None], *, merges_passes: bool) -> None:
        self.rings = _LossyRings(on_ring)
        self.running: list[str] = []
        """What ran at the last death: request ids, and what recovery was doing."""
        self._config = config
        self._merges = merges_passes
        self._steps_left: int | None = None
        self._dead = True
        self._engine: _SteppedEngine | None = None
        self._database = _DyingDatabase(config.database, self._step)

    def _step(self) -> None:
        """Called at every instruction. A dead engine does nothing any more."""
        if self._steps_left is not None and not self._dead:
            self._steps_left -= 1
            self._dead = self._steps_left < 0
        if self._dead:
            raise Killed

    def die_after_steps(self, steps: int | None) -> None:
        """Let the engine die after that many instructions; None: let it live."""
        self._steps_left = steps

    @property
    def alive(self) -> bool:
        return self._engine is not None

    def ring(self, words: Sequence[str] = ()) -> None:
        if self._engine is not None:
            self._engine.ring(words)

    async def start(self) -> bool:
        """Recover, then wait for permission to take turns. False: the engine died while recovering."""
        with closing(Database(self._config.database)) as database:
            claim_for_tests(database, SERVER)
        self._dead = False
        self.backend = HistoryBackend(self._step, merges_passes=self._merges)
        self._ledger = _LedgerUntilDeath(self._config.running_file, lambda: self._dead)
        api: Any = self.rings
        store, signals = open_store(self._config), EngineSignals()
        parts = build_engine(self._config, self._database, self.backend, store, self._ledger, api, signals)
        self._engine = _SteppedEngine(parts)
        try:
            await parts.recovery.run()
        except Killed:
            self._engine.stop()
            with suppress(Killed):  # a dead engine takes no last snapshots
                await self._engine.run()
            self._clear_engine()
            return False
        self._task = asyncio.create_task(self._engine.run())
        return await self.wait_until_idle()

    async def turns(self, count: int) -> bool:
        """Allow so many turns; returns when the engine waits again. False: the engine has died."""
        assert self._engine is not None
        self._engine.allow_turns(count)
        return await self.wait_until_idle()

    @asynccontextmanager
    async def held_at_a_save(self) -> AsyncIterator[None]:
        """Hold the engine in the middle of its next save, if a save comes; its other work goes on. The engine must not
        be armed to die."""
        assert self._engine is not None
        self.backend.saves_may_go.clear()
        before = self.backend.saving
        self.ring()
        engine, backend = self._engine, self.backend
        await until(lambda: engine.idle or backend.saving > before)
        self._engine.allow_turns(ALL)
        try:
            yield
        finally:
            self.backend.saves_may_go.set()
        assert await self.wait_until_idle()

    async def find_lost_rings(self) -> bool:
        """Look for lost rings, as the safety poll does. False: the engine died of what it found."""
        assert self._engine is not None
        self._engine.ring([SESSIONS])
        return await self.wait_until_idle()

    async def give_up_gaps(self) -> bool:
        """As `find_lost_rings`, when every missing number is overdue."""
        assert self._engine is not None
        gaps = self._engine.gaps
        bound, gaps.timeout_s = gaps.timeout_s, 0.0
        try:
            return await self.find_lost_rings()
        finally:
            gaps.timeout_s = bound

    async def wait_until_idle(self) -> bool:
        """Wait until the engine is idle. False: the engine has died instead."""
        assert self._engine is not None
        engine, task = self._engine, self._task

        def is_idle_or_done() -> bool:
            if self._dead:
                engine.die()
            return task.done() or (engine.idle and not self._dead)

        await until(is_idle_or_done)
        if not self._task.done():
            self._engine.halt()
            return True
        with suppress(Killed):
            await self._task
            raise AssertionError("the engine has ended by itself")
        self._clear_engine()
        return False

    async def stop(self, steps: int | None = None) -> bool:
        """Stop the engine in order, which leaves no record of running commands. False: it has died meanwhile, after
        that many instructions, for example in its last snapshots."""
        if self._engine is None:
            return True
        self._ledger.stop_recording()
        self._steps_left = steps
        self._engine.stop()
        self._engine.allow_turns(1)
        lives = True
        try:
            await self._task
        except Killed:
            lives = False
        self._clear_engine()
        return lives

    def _clear_engine(self) -> None:
        self._ledger.close()
        self.running = json.loads(self._config.running_file.read_text().partition("\n")[0])["running"]
        self._steps_left, self._dead, self._engine = None, True, None

    async def close(self) -> None:
        await self.stop()
        self._database.close()
