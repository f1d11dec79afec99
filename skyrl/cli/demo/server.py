"""A `skyrl serve` process for demo, capacity, benchmarks and tests: start, wait until ready, read status, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from skyrl.runtime.processes.ports import LOOPBACK, HeldPort
from skyrl.runtime.processes.supervision import dies_with_parent


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time. The message has the end of its log."""


class DemoServer:
    """One server on a free port with its own state directory."""

    def __init__(
        self,
        state_dir: Path,
        *flags: str,
        backend_config: dict[str, Any] | None = None,
        skyrl: Sequence[str] = (sys.executable, "-m", "skyrl.cli.main"),
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`skyrl` is the command; `cwd` and `environment` are those of this process unless given."""
        self.state_dir = state_dir
        self._skyrl = skyrl
        self._cwd = cwd
        self._environment = environment
        self._held = HeldPort.any()
        """Also between a stop and another start."""
        self.port = self._held.number
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.ready_s = 0.0
        self._flags = [*flags, "--backend-config", json.dumps(backend_config or {})]
        self._process: subprocess.Popen[bytes] | None = None
        # One client for all requests: each new one reads the machine's certificates, which takes 25 ms of CPU.
        unkept = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.url, trust_env=False, limits=unkept)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start without waiting. The terminal's Ctrl-C does not reach the server; `stop` ends it."""
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [*self._skyrl, "serve", "--port", str(self.port)]
        with (self.state_dir / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                dies_with_parent([*command, "--state-dir", str(self.state_dir), *self._flags], signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._cwd,
                env=os.environ if self._environment is None else self._environment,
                start_new_session=True,
            )
        self._started = time.monotonic()

    def wait_ready(self, timeout_s: float = 180.0) -> float:
        """Wait until the server can train and sample. Returns seconds since the start. Raises ServerFailed."""
        return self._wait("/readyz", timeout_s)

    def wait_api(self, timeout_s: float = 120.0) -> float:
        """Wait until the API answers. Returns seconds since the start. Raises ServerFailed."""
        return self._wait("/api/v1/healthz", timeout_s)

    def _wait(self, path: str, timeout_s: float) -> float:
        assert self._process is not None
        reasons: list[str] = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with {self._process.returncode}: {self._log_end()}")
            try:
                answer = self._http.get(path, timeout=5.0)
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            if answer.status_code == httpx.codes.OK:
                self.ready_s = time.monotonic() - self._started
                return self.ready_s
            reasons = answer.json()["reasons"]
            time.sleep(0.1)
        raise ServerFailed(f"not ready after {timeout_s:.0f} s: {reasons}: {self._log_end()}")

    def status(self) -> dict[str, Any]:
        return self._http.get("/statusz", timeout=60.0).json()

    def stop(self, timeout_s: float = 180.0) -> None:
        """Send SIGTERM, and wait until the server has ended. Kills the server after `timeout_s`."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _log_end(self) -> str:
        return (self.state_dir / "serve.log").read_text()[-2000:]
