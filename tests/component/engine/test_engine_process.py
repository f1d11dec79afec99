"""The engine process: it ends when asked to while PostgreSQL is away, and ends when another server has taken its
claim."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from skyrl.storage.db.claims import claim, read_claim
from tests.engine_process import EngineProcess
from tests.postgres_server import ON_BOTH, ON_POSTGRES, PostgresServer

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
