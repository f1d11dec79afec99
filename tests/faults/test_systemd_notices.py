"""What systemd hears from real servers: status lines, ready, alive, stopping. The test has systemd's end of the
socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest

from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.supervision import dies_with_parent

WAIT_S = 300.0
WATCHDOG_S = 0.3
SERVE = ("serve", "--backend", "none", "--base-model", "tiny", "--external-inference-url")
ROLLOUT = ("rollout", "--num-engines", "0", "--engine-url")


class InferenceServer(ThreadingHTTPServer):
    """Refuses connections until `serve`. Then it answers every GET with 503, and with 200 once it is `well`."""

    def __init__(self) -> None:
        self.well = False
        outer = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if outer.well else 503)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Answer, bind_and_activate=False)
        self.server_bind()

    def serve(self) -> threading.Thread:
        """`shutdown` ends the thread."""
        self.server_activate()
        serving = threading.Thread(target=self.serve_forever, args=(0.01,))
        serving.start()
        return serving

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def inference() -> Iterator[InferenceServer]:
    with InferenceServer() as server:
        yield server


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(WAIT_S)
        yield receiver


def lines_until(systemd: socket.socket, wanted: str) -> list[str]:
    """The lines that systemd gets, up to the message with a line that begins with `wanted`."""
    lines: list[str] = []
    while not any(line.startswith(wanted) for line in lines):
        lines += systemd.recv(4096).decode().splitlines()
    return lines


@contextmanager
def started(command: tuple[str, ...], directory: Path, port: int) -> Iterator[psutil.Process]:
    argv = (sys.executable, "-m", "skyrl.cli.main", *command, "--port", str(port), "--state-dir", str(directory / "s"))
    told = {"NOTIFY_SOCKET": str(directory / "notify"), "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6))}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            dies_with_parent(argv, signal.SIGTERM), env=os.environ | told, stderr=log, start_new_session=True
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(WAIT_S)


@pytest.mark.parametrize("command", [SERVE, ROLLOUT], ids=lambda command: command[0])
def test_systemd_hears_what_a_server_waits_for_that_it_is_ready_lives_and_stops(
    command: tuple[str, ...], inference: InferenceServer, systemd: socket.socket, tmp_path: Path
) -> None:
    port = free_port()
    with started((*command, inference.url), tmp_path, port) as server, ExitStack() as stack:
        lines = lines_until(systemd, "STATUS=")
        if command == SERVE:  # why the start waits
            lines += lines_until(systemd, "STATUS=api: ready; inference server: ")
            assert f"{inference.url} cannot be reached" in lines[-1]
        stack.callback(inference.serve().join)
        stack.callback(inference.shutdown)
        while not answers_not_ready(port):
            assert server.is_running()
            time.sleep(0.05)
        lines += lines_until(systemd, "WATCHDOG=1")
        assert "READY=1" not in lines

        inference.well = True
        *before, ready, status = lines_until(systemd, "READY=1")
        assert (ready, status) == ("READY=1", f"STATUS=ready at http://127.0.0.1:{port}")
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
        assert [line for line in before if line.startswith("STOPPING")] == []
        children = server.children(recursive=True)
        assert children
        assert [child for child in children if {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & child.environ().keys()] == []

        hang_and_go_on(server, systemd)
        server.send_signal(signal.SIGTERM)
        assert lines_until(systemd, "STOPPING=1")[-2] == "STOPPING=1"
        assert server.wait(WAIT_S) == 0


def answers_not_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 503
    except httpx.TransportError:
        return False


def hang_and_go_on(server: psutil.Process, systemd: socket.socket) -> None:
    """A server that hangs sends nothing for many of systemd's intervals. Then it goes on."""
    lines_until(systemd, "WATCHDOG=1")
    server.suspend()
    while server.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    drain(systemd)
    time.sleep(5 * WATCHDOG_S)
    assert drain(systemd) == 0
    server.resume()
    lines_until(systemd, "WATCHDOG=1")


def drain(systemd: socket.socket) -> int:
    """Read the messages that have arrived. Returns their number."""
    messages = 0
    systemd.setblocking(False)
    with suppress(BlockingIOError):
        while systemd.recv(4096):
            messages += 1
    systemd.settimeout(WAIT_S)
    return messages
