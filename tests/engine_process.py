"""An engine's process, started as the launcher starts it, for tests without a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.runtime.processes.runtime import BASE_MODEL_ENV, RUNTIME_ENV, Runtime
from skyrl.storage.db import claims
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState, read_state

SERVER = "first"
WAIT_S = 300.0
"""Ends a hanging test. Every wait takes some seconds of one core."""


def claim_for_tests(database: Database, server: str) -> None:
    """Take the claim, as a launcher does before it starts an engine, without checking who held the claim before."""
    assert database.write(lambda c: claims.claim(c, server, claims.read_claim(c)))


def start_engine(runtime: Runtime, log: Path, number: int | None = None) -> subprocess.Popen[bytes]:
    """Start an engine's process, of the base model `number` if the server has several."""
    which = {} if number is None else {BASE_MODEL_ENV: str(number)}
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "skyrl.engine.main"],
            env=os.environ | {RUNTIME_ENV: str(runtime.write())} | which,
            stdout=stream,
            stderr=stream,
        )


class EngineProcess:
    """One engine process of the server SERVER, on a database that `owner` has claimed, with its log."""

    def __init__(
        self, state_dir: Path, url: str, *, owner: str = SERVER, ray_address: str | None = None, **flags: Any
    ) -> None:
        """`ray_address` is HOST:PORT of a running cluster."""
        addresses = {} if ray_address is None else {"ray_address": ray_address}
        config = load_config(
            {"state_dir": state_dir, "base_model": str(model_path()), "database_url": url} | addresses | flags
        )
        self.running_file = config.running_file
        directory = state_dir / "sockets"
        directory.mkdir(parents=True)
        runtime = Runtime(config, directory, None, None, SERVER, ray_address=ray_address)
        self._log = state_dir / "engine.log"
        self.database = Database(url)
        claim_for_tests(self.database, owner)
        self.process = start_engine(runtime, self._log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def state(self) -> EngineState:
        return self.database.read(read_state)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the process runs."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"{self.state()}\n{self.log}"
            time.sleep(0.02)

    def ended(self) -> int:
        """The exit code. Waits for it."""
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.database.close()
