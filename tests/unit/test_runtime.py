"""What the launcher tells its processes, and how one ends whose database is away."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from skyrl.config.server import ConfigError, ServerConfig, load_config
from skyrl.db.faults import outage
from skyrl.processes.runtime import RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, Runtime, run_process
from skyrl.processes.startup import CANNOT_START, MAY_START, NotLoaded, cause_of_own


def test_processes_of_a_server_know_each_other_and_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"state_dir": tmp_path, "database_url": "postgresql://h/d", "api_processes": 3})
    told = Runtime(config, tmp_path, None, "key", "server-1")
    monkeypatch.setenv(RUNTIME_ENV, str(told.write()))
    engine = Runtime.from_environment()
    assert engine == told
    monkeypatch.setenv(SLOT_ENV, "2")
    monkeypatch.setenv(SOCKETS_ENV, "5,7")
    api = Runtime.from_environment()
    assert type(api.config) is ServerConfig
    assert (api.process_id, api.listening) == ("server-1/2", (5, 7))
    assert api.api_doorbell == api.api_doorbells[2]
    assert api.api_doorbells == engine.api_doorbells
    assert len(set(engine.api_doorbells)) == 3


def test_process_without_its_database_ends_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise OperationalError("SELECT 1", {}, Exception("the server\nis gone"))

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run_process("the engine", run, outage)
    assert ended.value.code == 1
    (record,) = caplog.records
    assert record.getMessage() == "the engine has ended, for the database cannot be used: the server is gone"
    assert record.exc_info is None


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("base_model: x\n holds  no model"), CANNOT_START), (NotLoaded("base_model: x"), MAY_START)],
)
def test_a_process_that_cannot_start_says_why_in_the_last_line_and_by_its_code(
    error: Exception, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_process("the engine", run, outage)
    assert ended.value.code == code
    cause = cause_of_own(code, "\n".join(caplog.messages))
    assert cause is not None
    assert cause.sentence == " ".join(str(error).split())


def test_any_other_trouble_is_told_whole() -> None:
    def run() -> None:
        raise IntegrityError("INSERT", {}, Exception("there already"))

    with pytest.raises(IntegrityError):
        run_process("the engine", run, outage)
