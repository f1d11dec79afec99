"""A backend whose models are the list of what was done to them, and an engine on it that dies wherever it is told to.

Everything but the backend is real: store, writer, database, scheduler, execution, snapshots, recovery, checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from engine_harness import SERVER, WAIT_S, Killed, claim_for_tests, until
from sqlalchemy import Connection

from skyrl.backends.base import AdamParams, InvalidRequest, ModelLimits, PassResult, TrainingPass
from skyrl.config.server import ServerConfig
from skyrl.db.database import Database
from skyrl.db.fence import Fence, FencedDatabase
from skyrl.engine.build import EngineParts, build_engine
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.signals import EngineSignals
from skyrl.notify.doorbell import SESSIONS
from skyrl.storage.registry import open_store
from skyrl.types.lora import LoraSpec

ALL = 1000
"""Turns: more than there is work for."""
REFUSED, NOT_FINITE = 500, 400
"""Tokens that the backend refuses, and whose gradient the next step cannot use."""

State = dict[str, list[Any]]
"""`done`: steps and loads; `gradient`: the passes since the last step."""


def fresh() -> State:
    return {"done": [], "gradient": []}


def weight(state: State) -> float:
    """A number that tells any two histories apart, exact in float32."""
    value = 1
    for letter in json.dumps(state):
        value = (value * 31 + ord(letter)) % 8_388_593
    return float(value)


def add_pass(state: State, token: int) -> PassResult:
    """What a pass does to a model, and its result. Raises InvalidRequest, and changes nothing, for a bad token."""
    if token == REFUSED:
        raise InvalidRequest("data[0]: token 500 is refused")
    state["gradient"].append(token)
    logprobs = [np.asarray([weight(state)], np.float32)]
    return PassResult(logprobs, {"passes:sum": float(len(state["gradient"]))})


def add_step(state: State, learning_rate: float) -> dict[str, float]:
    """What a step does. Raises FloatingPointError, and drops the gradient, where that is not finite."""
    gradient, state["gradient"] = state["gradient"], []
    if NOT_FINITE in gradient:
        raise FloatingPointError("the gradient is not finite")
    state["done"].append([learning_rate, *gradient])
    return {"weight": weight(state)}


class HistoryBackend:
    """The backend. `step()` is called before and after everything that it does."""

    limits = ModelLimits(vocab_size=512, max_context=16)
    repeats_exactly = True

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

    def save_adapter(self, model_id: str, directory: Path, *, dtype: str = "float32") -> None:
        self.save_state(model_id, directory)

    def save_snapshot(self, model_id: str, directory: Path) -> None:
        """In two shards, each in a folder of its own, as two ranks might write it."""
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
    """An engine may die before it writes, with its changes made and not committed, and when they are."""

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


class _Rings:
    """Tells the API, or does not: `deaf` loses it."""

    def __init__(self, heard: Callable[[list[str]], None]) -> None:
        self.deaf = False
        self._heard = heard
        self._loop = asyncio.get_running_loop()

    def ring(self, words: Iterable[str] = ()) -> None:
        if not self.deaf:
            self._loop.call_soon_threadsafe(self._heard, list(words))


class _NotesUntilDeath(CrashLedger):
    """What is begun after that was not running when the engine died."""

    def __init__(self, file: Path, dead: Callable[[], bool]) -> None:
        self._dead = dead
        super().__init__(file)

    def _write(self) -> None:
        if not self._dead():
            super()._write()


class _TurnByTurn:
    """An engine that waits before each turn until it is let go."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._turn, parts.engine._turn = parts.engine._turn, self._turn_when_let_go  # type: ignore[method-assign]
        self._left = 0
        self._go = asyncio.Event()
        self._waits = self._in_turn = False
        self.ring, self.run, self.stop = parts.engine.ring, parts.engine.run, parts.signals.stop

    def let_go(self, turns: int) -> None:
        self._left, self._waits = turns, False
        self._go.set()

    def halt(self) -> None:
        self._left = 0

    def die(self) -> None:
        """To its end, wherever it is."""
        self._parts.signals.fail(Killed())
        self.let_go(1)
        self.ring()

    async def _turn_when_let_go(self) -> None:
        while not self._left:
            self._go.clear()
            self._waits = True
            await self._go.wait()
        self._left -= 1
        self._in_turn = True
        await self._turn()
        self._in_turn = False

    @property
    def idle(self) -> bool:
        """Whether it waits: to be let go, or for a ring."""
        parts, signals, log = self._parts, self._parts.signals, self._parts.log
        waits = self._waits or not (self._in_turn or parts.scheduler.has_work or signals.work.is_set())
        reads = log._has_news or log._reading.locked() or signals.arrived.is_set()
        return waits and not (reads or parts.file_commands.running)


class MortalEngine:
    """The engine of one state directory, from start to death to start."""

    def __init__(self, config: ServerConfig, heard: Callable[[list[str]], None], *, merges_passes: bool) -> None:
        self.rings = _Rings(heard)
        self.running: list[str] = []
        """What ran when it last died: request ids, and what recovery was at."""
        self._config = config
        self._merges = merges_passes
        self._left: int | None = None
        self._dead = True
        self._engine: _TurnByTurn | None = None
        self._database = _DyingDatabase(config.database, self._step)

    def _step(self) -> None:
        """Every instruction passes here. The dead do nothing any more."""
        if self._left is not None and not self._dead:
            self._left -= 1
            self._dead = self._left < 0
        if self._dead:
            raise Killed

    def die_after(self, steps: int | None) -> None:
        """Arm its death so many instructions from now; None: it lives."""
        self._left = steps

    @property
    def alive(self) -> bool:
        return self._engine is not None

    def ring(self, words: Sequence[str] = ()) -> None:
        if self._engine is not None:
            self._engine.ring(words)

    async def start(self) -> bool:
        """Recover, and wait to be let go. False: it has died of that."""
        with closing(Database(self._config.database)) as database:
            claim_for_tests(database, SERVER)
        self._dead = False
        self.backend = HistoryBackend(self._step, merges_passes=self._merges)
        self._ledger = _NotesUntilDeath(self._config.running_file, lambda: self._dead)
        api: Any = self.rings
        store, signals = open_store(self._config), EngineSignals()
        parts = build_engine(self._config, self._database, self.backend, store, self._ledger, api, signals)
        self._engine = _TurnByTurn(parts)
        try:
            await parts.recovery.run()
        except Killed:
            self._engine.stop()
            await self._engine.run()
            self._gone()
            return False
        self._task = asyncio.create_task(self._engine.run())
        return await self.rest()

    async def turns(self, count: int) -> bool:
        """Let it go; returns when it waits again. False: it has died."""
        assert self._engine is not None
        self._engine.let_go(count)
        return await self.rest()

    @asynccontextmanager
    async def held_at_a_save(self) -> AsyncIterator[None]:
        """While the next save is in the middle of it, if one comes; the rest of the engine runs. Nothing is to die."""
        assert self._engine is not None
        self.backend.saves_may_go.clear()
        before = self.backend.saving
        self.ring()
        engine, backend = self._engine, self.backend
        await until(lambda: engine.idle or backend.saving > before)
        self._engine.let_go(ALL)
        try:
            yield
        finally:
            self.backend.saves_may_go.set()
        assert await self.rest()

    async def look(self) -> bool:
        """The time has come to look for lost rings. False: it has died of what it found."""
        assert self._engine is not None
        self._engine.ring([SESSIONS])
        return await self.rest()

    async def rest(self) -> bool:
        """Wait until it waits. False: it has died instead."""
        assert self._engine is not None
        engine, task = self._engine, self._task

        def rests() -> bool:
            if self._dead:
                engine.die()
            return task.done() or (engine.idle and not self._dead)

        await until(rests)
        if not self._task.done():
            self._engine.halt()
            return True
        with suppress(Killed):
            await self._task
            raise AssertionError("the engine has ended by itself")
        self._gone()
        return False

    async def stop(self) -> None:
        """An end in order, which leaves no trace of what ran."""
        if self._engine is None:
            return
        self._left = None
        self._engine.stop()
        self._engine.let_go(1)
        await self._task
        self._gone()

    def _gone(self) -> None:
        self._ledger.close()
        self.running = json.loads(self._config.running_file.read_text().partition("\n")[0])["running"]
        self._left, self._dead, self._engine = None, True, None

    async def close(self) -> None:
        await self.stop()
        self._database.close()
