"""The engine process: it ends when asked to while PostgreSQL is away, and ends when another server has taken its
claim."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from engine_harness import claim_for_tests
from sqlalchemy.exc import OperationalError

from skyrl.config.loading import load_config
from skyrl.db.database import Database
from skyrl.db.engine_state import EngineState, claim, read_claim, read_state
from skyrl.launcher.runtime import RUNTIME_ENV, Runtime
from skyrl.tiny import model_path
from tests.postgres_server import ON_BOTH, ON_POSTGRES, PostgresServer

SERVER = "first"
WAIT_S = 300.0
"""Ends a hanging test. Every test takes at most some seconds of one core."""
LOADING = "loading the base model"


class EngineProcess:
    """One engine process of the server SERVER, on a database that `owner` has claimed, with its log."""

    def __init__(self, state_dir: Path, url: str, owner: str = SERVER, model: Path | None = None) -> None:
        config = load_config({"state_dir": state_dir, "base_model": str(model or model_path()), "database_url": url})
        self.running_file = config.running_file
        directory = state_dir / "sockets"
        directory.mkdir(parents=True)
        runtime = Runtime(config, directory, None, None, SERVER)
        self._log = state_dir / "engine.log"
        self.database = Database(url)
        claim_for_tests(self.database, owner)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "skyrl.engine.main"],
                env=os.environ | {RUNTIME_ENV: str(runtime.write())},
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def state(self) -> EngineState:
        return self.database.read(read_state)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def ended(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.database.close()


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


@ON_BOTH
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
    taken = engine.state()
    engine.process.send_signal(signal.SIGCONT)
    assert engine.ended() == 1
    assert "server first does not hold the claim to this database any more" in engine.log
    assert "Traceback" not in engine.log
    assert engine.state() == taken


def test_an_engine_without_the_claim_ends_before_it_loads_the_model(tmp_path: Path, migrated_url: str) -> None:
    with closing(EngineProcess(tmp_path / "state", migrated_url, "second")) as engine:
        before = engine.database.read(read_claim), engine.state()
        assert engine.ended() == 1
        assert "server first does not hold the claim" in engine.log
        assert (engine.database.read(read_claim), engine.state()) == before


def test_an_engine_that_gets_a_signal_before_loading_does_not_load(tmp_path: Path, migrated_url: str) -> None:
    model = tmp_path / "model"
    model.mkdir()  # loading this model fails
    with closing(EngineProcess(tmp_path / "state", migrated_url, model=model)) as engine:
        with engine.database.writer.begin():  # the engine waits for the write lock to record that it is loading
            engine.until(lambda: engine.running_file.exists() and handles(engine.process.pid, signal.SIGTERM))
            os.utime(engine.running_file, (0, 0))
            engine.process.send_signal(signal.SIGTERM)
            engine.until(lambda: engine.running_file.stat().st_mtime_ns > 0)
        assert engine.ended() == 0, engine.log
        assert engine.state().reason == "the engine has stopped"
