"""The settings that the launcher hands to its processes, and the ways in which a process ends after a failure."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.runtime.processes.runtime import RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, Runtime, run_process
from skyrl.runtime.processes.startup import CANNOT_START, MAY_START, NotLoaded, cause_of_own
from skyrl.storage.db.faults import outage


def test_a_process_reads_the_servers_settings_and_its_own_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"state_dir": tmp_path, "database_url": "postgresql://h/d", "api_processes": 3})
    written = Runtime(
        config, tmp_path, "http://router", "key", "server-1", ("http://one", "http://two"), "ray:1", 9.0, True
    )
    monkeypatch.setenv(RUNTIME_ENV, str(written.write()))
    engine = Runtime.from_environment()
    assert engine == written
    monkeypatch.setenv(SLOT_ENV, "2")
    monkeypatch.setenv(SOCKETS_ENV, "5,7")
    api = Runtime.from_environment()
    assert type(api.config) is ServerConfig
    assert (api.process_id, api.listening) == ("server-1/2", (5, 7))
    assert api.api_doorbell == api.api_doorbells[2]
    assert api.api_doorbells == engine.api_doorbells
    assert len(set(engine.api_doorbells)) == 3


def test_the_rows_of_placed_vllms_have_an_owner_for_each_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [{"base_model": f"acme/{name}"} for name in ("one", "two")]
    configs = load_config({"state_dir": tmp_path, "base_models": entries}), load_config({"state_dir": tmp_path})
    parts = tuple(Runtime(part, tmp_path, None, None, "server-1") for part in base_models_of(configs[0]))
    monkeypatch.setenv(
        RUNTIME_ENV, str(Runtime(configs[0], tmp_path, None, None, "server-1", base_models=parts).write())
    )
    assert [each.placement_owner for each in Runtime.from_environment().each] == ["server-1/one", "server-1/two"]
    assert Runtime(configs[1], tmp_path, None, None, "server-1").placement_owner == "server-1"


def test_a_process_that_loses_its_database_ends_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise OperationalError("SELECT 1", {}, Exception("the server\nis gone"))

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run_process("the engine", run, outage)
    assert ended.value.code == 1
    (record,) = caplog.records
    assert record.getMessage() == "the engine has ended because the database cannot be used: the server is gone"
    assert record.exc_info is None


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("base_model: x\n holds  no model"), CANNOT_START), (NotLoaded("base_model: x"), MAY_START)],
)
def test_a_process_that_cannot_start_gives_the_reason_in_its_last_line_and_exit_code(
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


def test_any_other_error_is_raised() -> None:
    def run() -> None:
        raise IntegrityError("INSERT", {}, Exception("there already"))

    with pytest.raises(IntegrityError):
        run_process("the engine", run, outage)
