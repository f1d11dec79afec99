"""The engine process: it ends when asked to while PostgreSQL is away, and when another server has taken its claim; and
kill -9 of one of two takes only its own base model's training away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer
from several_engines import ENTRIES, FIRST, SECOND, two_harnesses
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from skyrl.base.config.loading import load_config
from skyrl.base.config.several import base_models_of
from skyrl.base.types.requests import Kind
from skyrl.base.wire.results import to_json
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db import claims
from skyrl.storage.db.claims import claim, read_claim
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState, read_state
from skyrl.storage.db.futures import futures
from tests.engine_process import SERVER, WAIT_S, EngineProcess, start_engine
from tests.postgres_server import ON_BOTH_SLOWLY, ON_POSTGRES, PostgresServer

LOADING = "loading the base model"


@pytest.fixture
def engine(tmp_path: Path, migrated_url: str) -> Iterator[EngineProcess]:
    with closing(EngineProcess(tmp_path / "state", migrated_url)) as engine:
        yield engine


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal."""
    handled = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(handled, 16) >> (number - 1) & 1)


@contextmanager
def away(postgres: PostgresServer) -> Iterator[None]:
    postgres.stop()
    try:
        yield
    finally:
        postgres.start()


@ON_POSTGRES
@pytest.mark.parametrize("moment", ["while it starts", "when it runs"])
def test_an_engine_without_database_ends_when_it_gets_a_signal(
    engine: EngineProcess, postgres: PostgresServer, moment: str
) -> None:
    if moment == "while it starts":
        engine.until(lambda: engine.state().reason == LOADING)
    else:
        engine.until(lambda: engine.state().training_ready)
    with away(postgres):
        engine.until(lambda: "the database cannot be used, tried again in" in engine.log)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.ended() == 1
        assert "the engine has ended because the database cannot be used" in engine.log
        assert "the database was not told that the engine has stopped" in engine.log
        assert "Traceback" not in engine.log


@ON_BOTH_SLOWLY
def test_an_engine_ends_with_the_reason_if_another_server_took_its_claim(engine: EngineProcess) -> None:
    engine.until(lambda: engine.state().training_ready)
    taken_over = False
    while not taken_over:
        engine.process.send_signal(signal.SIGSTOP)
        try:
            engine.database.write(lambda c: claim(c, "second", read_claim(c)))
            taken_over = True
        except OperationalError:  # the stopped engine is inside a write and holds the lock
            engine.process.send_signal(signal.SIGCONT)
            time.sleep(0.5)  # or it is stopped again before it has gone on
    taken = engine.state()
    engine.process.send_signal(signal.SIGCONT)
    assert engine.ended() == 1
    assert "server first does not hold the claim to this database any more" in engine.log
    assert "Traceback" not in engine.log
    assert engine.state() == taken


def test_an_engine_without_the_claim_ends_before_it_loads_the_model(tmp_path: Path, migrated_url: str) -> None:
    with closing(EngineProcess(tmp_path / "state", migrated_url, owner="second")) as engine:
        before = engine.database.read(read_claim), engine.state()
        assert engine.ended() == 1
        assert "server first does not hold the claim" in engine.log
        assert (engine.database.read(read_claim), engine.state()) == before


def test_an_engine_that_gets_a_signal_before_loading_does_not_load(tmp_path: Path, migrated_url: str) -> None:
    model = tmp_path / "model"
    model.mkdir()  # loading this model fails
    with closing(EngineProcess(tmp_path / "state", migrated_url, base_model=str(model))) as engine:
        with engine.database.writer.begin():  # the engine waits for the write lock to record that it is loading
            engine.until(lambda: engine.running_file.exists() and handles(engine.process.pid, signal.SIGTERM))
            os.utime(engine.running_file, (0, 0))
            engine.process.send_signal(signal.SIGTERM)
            engine.until(lambda: engine.running_file.stat().st_mtime_ns > 0)
        assert engine.ended() == 0, engine.log
        assert engine.state().reason == "the engine has stopped"


STEPS = 25
ENDED = futures.c.status != "pending"


class Engines:
    """The engine processes of a server, as its launcher starts them."""

    def __init__(self, state_dir: Path, url: str) -> None:
        flags = {"state_dir": state_dir, "database_url": url, "base_models": ENTRIES, "snapshot_interval_s": 0.5}
        config = load_config(flags)
        directory = state_dir / "sockets"
        directory.mkdir(parents=True)
        each = tuple(Runtime(part, directory, None, None, SERVER) for part in base_models_of(config))
        self._runtime = Runtime(config, directory, None, None, SERVER, base_models=each)
        self._keys = [part.config.role.state_keys[0] for part in each]
        self._state_dir = state_dir
        self.database = Database(url)
        assert self.database.write(lambda c: claims.claim(c, SERVER, claims.read_claim(c), self._keys))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        log = self._log(name)
        self.processes[name] = start_engine(self._runtime, log, self._keys.index(name))

    def _log(self, name: str) -> Path:
        return self._state_dir / f"{name}.log"

    def state(self, name: str) -> EngineState:
        return self.database.read(lambda c: read_state(c, (name,)))

    def series(self) -> list[str]:
        """All series that the server's processes publish."""
        text = MetricsDirectory(self._runtime.metrics_directory).read()
        return [line for line in text.splitlines() if not line.startswith("#")]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while all processes run."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            for name, process in self.processes.items():
                assert process.poll() is None, self._log(name).read_text()
                assert time.monotonic() < deadline, self._log(name).read_text()
            await asyncio.sleep(0.05)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.database.close()


@pytest.fixture
def engines(tmp_path: Path, migrated_url: str) -> Iterator[Engines]:
    with closing(Engines(tmp_path / "state", migrated_url)) as engines:
        yield engines


def ended(trainer: Trainer) -> int:
    """How many commands of the model have an outcome."""
    query = select(func.count()).select_from(futures).where(futures.c.model_id == trainer.model_id, ENDED)
    return trainer.harness.database.read(lambda c: c.execute(query).scalar_one())


def results(trainer: Trainer) -> list[tuple[int, Any]]:
    """Numbers and results of the model's passes and steps. None has failed."""
    done, kinds = futures.c.status == "done", futures.c.kind.in_([Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP])
    query = select(futures.c.seq_id, futures.c.result, futures.c.result_format).order_by(futures.c.seq_id)
    query = query.where(futures.c.model_id == trainer.model_id, done, kinds)
    rows = trainer.harness.database.read(lambda c: c.execute(query).all())
    return [(row.seq_id, json.loads(to_json(row.result, row.result_format))) for row in rows]


async def send_steps(trainer: Trainer, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + STEPS):
        await trainer.send_step(seed)


def saved_files(harness: Harness, trainer: Trainer) -> dict[str, bytes]:
    (row,) = harness.checkpoint_rows(trainer.model_id)
    return harness.stored(row)


async def test_a_killed_engine_takes_only_the_training_of_its_own_base_model_away(
    engines: Engines, tmp_path: Path
) -> None:
    url = engines.database.url
    async with two_harnesses(tmp_path / "state", database_url=url) as (first, second):
        mine, other = await Trainer.create(first), await Trainer.create(second)
        for trainer in (mine, other):
            await send_steps(trainer, 1)
        engines.start(FIRST)
        engines.start(SECOND)
        await engines.until(lambda: ended(other) > STEPS)
        killed = engines.processes.pop(SECOND)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        at_death = ended(other)
        assert at_death < other.seq_id, "it was killed under load"
        await send_steps(mine, 1000)
        await engines.until(lambda: ended(mine) == mine.seq_id + 1)
        assert engines.state(FIRST).training_ready
        await engines.until(lambda: any("skyrl_sessions{" in series for series in engines.series()))
        assert all('process="engine-first",base_model="first"' in series for series in engines.series())
        assert ended(other) == at_death, "nobody runs its commands"
        engines.start(SECOND)
        await send_steps(other, 1000)
        for trainer in (mine, other):
            await trainer.send(Kind.SAVE_WEIGHTS, path="end")
        await engines.until(lambda: all(ended(each) == each.seq_id + 1 for each in (mine, other)))
        assert len(results(mine)) == 2 * 3 * STEPS
        assert results(other) == results(mine), "both have the same files, seeds and data"
        assert saved_files(second, other) == saved_files(first, mine) != {}
