"""A `skyrl rollout` process for tests, and other people's gateways in front of its sidecars."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from skyrl.runtime.processes.ports import HeldPort, free_port
from skyrl.runtime.processes.supervision import dies_with_parent

READY_S = 500.0


class RunningPlane:
    """`skyrl rollout` with `flags` on a free port."""

    def __init__(self, state_dir: Path, *flags: str) -> None:
        self._held = HeldPort.any()
        self.port = self._held.number
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)
        self._state_dir = state_dir
        self.state_dir = state_dir / "state"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = (sys.executable, "-m", "skyrl.cli.main", "rollout", "--port", str(self.port), *self._flags)
        with (self._state_dir / "rollout.log").open("ab") as log:
            self._process = subprocess.Popen(
                dies_with_parent((*command, "--state-dir", str(self.state_dir)), signal.SIGTERM),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_routable(self, workers: int) -> None:
        """Wait until this number of engines get requests."""
        end = time.monotonic() + READY_S
        while self.routable() < workers:
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.1)

    def routable(self) -> int:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/statusz").json()["routable"]
        return 0

    def sidecars(self) -> list[str]:
        return [worker["url"] for worker in self.http.get("/workers").json()["workers"]]

    def processes(self, word: str) -> list[psutil.Process]:
        """The plane's processes with `word` in their command lines."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def log(self) -> str:
        return (self._state_dir / "rollout.log").read_text()[-3000:]

    def stop(self) -> int:
        """Send SIGTERM; the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=120)
        finally:
            self.http.close()
            self._held.close()
            if self._process.poll() is None:
                self._process.kill()


@contextlib.contextmanager
def gateway(module: str, workers: Sequence[str]) -> Iterator[httpx.Client]:
    """One of the gateways from PyPI in front of these workers: `sglang_router` or `vllm_router`."""
    port, metrics = free_port(), free_port()
    command = (sys.executable, "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", str(port))
    options = ("--prometheus-port", str(metrics), "--policy", "round_robin", "--log-level", "error")
    process = subprocess.Popen(
        dies_with_parent((*command, *options, "--worker-urls", *workers)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            end = time.monotonic() + 120
            while not _ready(client):
                assert time.monotonic() < end, "the gateway is not ready"
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait()


def _ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/readiness").status_code == 200
    return False
