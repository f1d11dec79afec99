"""The launcher with cheap real processes: a few lines of Python replace the engine and the API."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import WAIT_S, log_of, wait_until

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher import skyrl_processes
from skyrl.cli.launcher.main import Launcher
from skyrl.cli.launcher.parts import ServerEnded
from skyrl.cli.launcher.preflight import Findings
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.startup import CANNOT_START, MARK, MAY_START, StartupError
from skyrl.runtime.processes.supervision import SupervisedProcess
from skyrl.runtime.processes.systemd import Systemd

SLEEP = "import time; time.sleep(600)"
ENGINE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('told to stop', flush=True), sys.exit(0)))
print('up', flush=True)
time.sleep(600)
"""
API = """
import os, socket
listening = socket.socket(fileno=int(os.environ['SKYRL_API_SOCKETS']))
while True:
    connection, _ = listening.accept()
    connection.recv(65536)
    connection.sendall(b'HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\nconnection: close\\r\\n\\r\\n{}')
    connection.close()
"""


def program_that_ends(code: int, message: str) -> str:
    return f"import sys; print('loading'); print({MARK + message!r}, flush=True); sys.exit({code})"


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return load_config(
        {
            "state_dir": tmp_path,
            "port": free_port(),
            "external_inference_url": "http://127.0.0.1:1",
            "log_level": "info",
        }
    )


@pytest.fixture
def run(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., asyncio.Task[None]]:
    """A function that starts a launcher with the given programs as engine and API. The event `stop` ends the
    launcher."""

    def start(engine: str, stop: asyncio.Event, api: str = SLEEP) -> asyncio.Task[None]:
        programs = {"skyrl.engine.main": engine, "skyrl.api.server": api}
        monkeypatch.setattr(skyrl_processes, "_python", lambda module: [sys.executable, "-S", "-c", programs[module]])
        return asyncio.create_task(Launcher(config, [Findings([])], Systemd()).run(stop))

    return start


async def test_an_engine_that_can_never_start_ends_the_server_with_the_engines_message(
    config: ServerConfig, run: Callable[..., asyncio.Task[None]]
) -> None:
    running = run(program_that_ends(CANNOT_START, "base_model: no weights"), asyncio.Event())
    with pytest.raises(StartupError, match="^base_model: no weights$") as failed:
        await asyncio.wait_for(running, WAIT_S)
    assert failed.value.log == str(config.state_dir / "logs" / "engine.log")
    assert failed.value.log_end == f"loading\n{MARK}base_model: no weights"
    assert log_of(config, "engine").count("=====") == 2, "the engine started once"


async def test_an_engine_that_may_start_later_gets_a_second_start(
    config: ServerConfig, run: Callable[..., asyncio.Task[None]]
) -> None:
    running = run(program_that_ends(MAY_START, "out of memory"), asyncio.Event())
    with pytest.raises(StartupError, match="^out of memory$"):
        await asyncio.wait_for(running, WAIT_S)
    assert log_of(config, "engine").count("engine: start") == 2


async def test_an_engine_that_was_ready_is_started_again_whatever_its_exit_code(
    config: ServerConfig, run: Callable[..., asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    wait_for_go = "import os, sys, time\nwhile not os.path.exists('{}'): time.sleep(0.02)\n".format(
        config.state_dir / "go"
    )
    stop = asyncio.Event()
    with caplog.at_level(logging.INFO):
        running = run(wait_for_go + program_that_ends(CANNOT_START, "base_model: the directory is gone"), stop, API)
        await wait_until(lambda: "ready at" in caplog.text, running)
        (config.state_dir / "go").touch()
        await wait_until(lambda: log_of(config, "engine").count("engine: start") == 3, running)
        stop.set()
        await asyncio.wait_for(running, WAIT_S)


async def test_an_engine_that_was_ready_is_started_again_while_the_server_waits_for_an_external_vllm(
    config: ServerConfig, run: Callable[..., asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    wait_for_go = "import os, sys, time\nwhile not os.path.exists('{}'): time.sleep(0.02)\n".format(
        config.state_dir / "go"
    )
    body = '{"reasons": ["sampling: nobody answers"]}'
    answer = API.replace("200 OK", "503 Away").replace("length: 2", f"length: {len(body)}").replace("{}", body)
    stop = asyncio.Event()
    with caplog.at_level(logging.INFO):
        running = run(wait_for_go + program_that_ends(CANNOT_START, "base_model: the directory is gone"), stop, answer)
        await wait_until(lambda: "engine: ready" in caplog.text, running)
        (config.state_dir / "go").touch()
        await wait_until(lambda: log_of(config, "engine").count("engine: start") == 3, running)
        assert "ready at" not in caplog.text
        stop.set()
        await asyncio.wait_for(running, WAIT_S)


async def test_a_launcher_that_is_told_to_stop_at_once_starts_no_process(
    config: ServerConfig, run: Callable[..., asyncio.Task[None]]
) -> None:
    stop = asyncio.Event()
    stop.set()
    await asyncio.wait_for(run(ENGINE, stop), WAIT_S)
    assert not (config.state_dir / "logs").exists()


@pytest.mark.parametrize("code", [0, 1])
async def test_an_engine_that_crashes_before_it_is_ready_is_started_again(
    config: ServerConfig, run: Callable[..., asyncio.Task[None]], code: int
) -> None:
    """The engine may repeat a command that kills it; after two deaths the engine skips that command."""
    stop = asyncio.Event()
    running = run(f"raise SystemExit({code})", stop)
    await wait_until(lambda: log_of(config, "engine").count("engine: start") == 4, running)
    stop.set()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_supervisor_that_fails_ends_the_server_in_order(
    config: ServerConfig, run: Callable[..., asyncio.Task[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervise = SupervisedProcess.run

    async def broken_run(self: SupervisedProcess) -> None:
        if self.name == "engine":
            await supervise(self)
            return
        while "up" not in log_of(config, "engine"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        raise ValueError("a bug")

    monkeypatch.setattr(SupervisedProcess, "run", broken_run)
    with pytest.raises(ServerEnded, match="^the server has stopped because supervising api ended: a bug"):
        await asyncio.wait_for(run(ENGINE, asyncio.Event()), WAIT_S)
    assert "told to stop" in log_of(config, "engine")


async def test_the_engine_is_told_to_stop_although_stopping_the_api_fails(
    config: ServerConfig,
    run: Callable[..., asyncio.Task[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    halt = SupervisedProcess.stop

    async def broken_stop(self: SupervisedProcess, grace_s: float = 10.0) -> None:
        await halt(self, grace_s)
        if self.name == "api":
            raise ProcessLookupError

    monkeypatch.setattr(SupervisedProcess, "stop", broken_stop)
    stop = asyncio.Event()
    running = run(ENGINE, stop)
    await wait_until(lambda: "up" in log_of(config, "engine"), running)
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    assert "told to stop" in log_of(config, "engine")
    assert "stopping api failed" in caplog.text
    assert not (config.state_dir / "run").is_symlink()


async def test_the_log_says_what_the_server_waits_for_and_the_last_line_of_the_dead_engine(
    config: ServerConfig,
    run: Callable[..., asyncio.Task[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("skyrl.cli.launcher.progress.SAY_S", 0.0)
    stop = asyncio.Event()
    with caplog.at_level(logging.INFO):
        running = run("print('Segmentation fault', flush=True); raise SystemExit(1)", stop)
        await wait_until(lambda: "engine last ended with: Segmentation fault" in caplog.text, running)
        assert "not ready yet: the API is starting" in caplog.text
        stop.set()
        await asyncio.wait_for(running, WAIT_S)
