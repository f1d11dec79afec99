"""The launcher of a server with two base models, with cheap real processes in place of the engines and the API."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from launched import WAIT_S, log_of, wait_until

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.cli.launcher import skyrl_processes
from skyrl.cli.launcher.main import Launcher
from skyrl.cli.launcher.preflight import Findings
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.startup import CANNOT_START, MARK, MAY_START, StartupError
from skyrl.runtime.processes.systemd import Systemd
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState, publish_training, read_state
from tests.databases import make_tables

RUNS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('told to stop', flush=True), sys.exit(0)))
print('base model', os.environ['SKYRL_BASE_MODEL_NUMBER'], flush=True)
while not os.path.exists(os.environ['RUNS_UNTIL']):
    time.sleep(0.02)
os.remove(os.environ['RUNS_UNTIL'])
sys.exit(1)
"""
API = """
import os, socket
print('base model', os.environ.get('SKYRL_BASE_MODEL_NUMBER'), flush=True)
listening = socket.socket(fileno=int(os.environ['SKYRL_API_SOCKETS']))
while True:
    connection, _ = listening.accept()
    connection.recv(65536)
    connection.sendall(b'HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\nconnection: close\\r\\n\\r\\n{}')
    connection.close()
"""
SLEEP = "import time; time.sleep(600)"


def ends(code: int, message: str) -> str:
    return f"import sys; print('loading'); print({MARK + message!r}, flush=True); sys.exit({code})"


def engines(*programs: str) -> str:
    """One program for all engines: each runs that of its base model's number."""
    return f"import os\nexec({list(programs)!r}[int(os.environ['SKYRL_BASE_MODEL_NUMBER'])])"


def once_told(config: ServerConfig) -> str:
    """Waits for the file `go`."""
    return f"import os, time\nwhile not os.path.exists({str(config.state_dir / 'go')!r}): time.sleep(0.02)\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """Two base models that train, on somebody else's vLLMs."""
    monkeypatch.setenv("RUNS_UNTIL", str(tmp_path / "crash"))
    external = {"base_model": "tiny", "external_inference_url": "http://127.0.0.1:1"}
    entries = [{**external, "served_model_names": [name]} for name in ("first", "second")]
    return load_config(
        {"state_dir": tmp_path, "port": free_port(), "base_models": json.dumps(entries), "log_level": "info"}
    )


Run = Callable[..., asyncio.Task[None]]


@pytest.fixture
def stop() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def run(config: ServerConfig, stop: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> Run:
    def start(engine: str, api: str = API) -> asyncio.Task[None]:
        programs = {"skyrl.engine.main": engine, "skyrl.api.server": api}
        monkeypatch.setattr(skyrl_processes, "_python", lambda module: [sys.executable, "-S", "-c", programs[module]])
        return asyncio.create_task(Launcher(config, [Findings([]), Findings([])], Systemd()).run(stop))

    return start


@pytest.fixture
def database(config: ServerConfig) -> Iterator[Database]:
    with closing(Database(config.database)) as opened:
        make_tables(opened)
        yield opened


def row(database: Database, name: str) -> EngineState:
    return database.read(lambda c: read_state(c, (name,)))


async def test_a_base_model_that_can_never_start_is_given_up_and_the_other_serves(
    config: ServerConfig, run: Run, stop: asyncio.Event, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        running = run(engines(ends(CANNOT_START, "base_model: no weights"), RUNS), once_told(config) + API)
        await wait_until(lambda: row(database, "first").reason == "base_model: no weights", running)
        (config.state_dir / "go").touch()
        await wait_until(lambda: "ready at" in caplog.text, running)
    assert "first cannot start and is given up" in caplog.text
    assert f"loading\n{MARK}base_model: no weights" in caplog.text, "the end of the engine's log"
    assert re.search(r"ready at \S+ after .* \(first has not started: base_model: no weights", caplog.text)
    assert not row(database, "first").training_ready
    assert log_of(config, "engine-first").count("=====") == 2, "the engine started once"
    await wait_until(lambda: "base model 1" in log_of(config, "engine-second"), running)
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    assert "told to stop" in log_of(config, "engine-second")


async def test_an_engine_that_crashes_starts_again_beside_a_base_model_that_was_given_up(
    config: ServerConfig, run: Run, stop: asyncio.Event, database: Database
) -> None:
    running = run(engines(ends(MAY_START, "out of memory"), RUNS))
    await wait_until(lambda: row(database, "first").reason == "out of memory", running)
    assert log_of(config, "engine-first").count("engine-first: start") == 2
    for start in range(1, 4):
        await wait_until(lambda start=start: log_of(config, "engine-second").count("base model 1") == start, running)
        (config.state_dir / "crash").touch()
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    assert log_of(config, "engine-first").count("engine-first: start") == 2, "it stays given up"


async def test_the_server_ends_when_no_base_model_can_start(config: ServerConfig, run: Run, database: Database) -> None:
    running = run(engines(ends(CANNOT_START, "no weights"), ends(MAY_START, "out of memory")))
    with pytest.raises(StartupError, match="^out of memory$") as failed:  # it was tried twice, and so is the last
        await asyncio.wait_for(running, WAIT_S)
    assert failed.value.log == str(config.state_dir / "logs" / "engine-second.log")


async def test_a_base_model_that_was_ready_starts_again_while_the_other_still_starts(
    config: ServerConfig, run: Run, stop: asyncio.Event, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    unready = API.replace("200 OK", "503 Away").replace("length: 2", "length: 15").replace("{}", '{"reasons": []}')
    with caplog.at_level(logging.INFO):
        running = run(engines(once_told(config) + ends(CANNOT_START, "the directory is gone"), SLEEP), unready)
        await wait_until(lambda: log_of(config, "engine-second"), running)
        database.write(lambda c: publish_training(c, ready=True, reason="", key="first"))
        await wait_until(lambda: "engine-first: ready" in caplog.text, running)
        (config.state_dir / "go").touch()
        await wait_until(lambda: log_of(config, "engine-first").count("engine-first: start") == 3, running)
    assert "ready at" not in caplog.text
    stop.set()
    await asyncio.wait_for(running, WAIT_S)


async def test_only_the_processes_of_a_base_model_know_its_number(
    config: ServerConfig, run: Run, stop: asyncio.Event
) -> None:
    running = run(engines(RUNS, RUNS))
    said = {"engine-first": "base model 0", "engine-second": "base model 1", "api": "base model None"}
    await wait_until(lambda: all(word in log_of(config, name) for name, word in said.items()), running)
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    assert [part.role.process("engine") for part in base_models_of(config)] == list(said)[:2]
