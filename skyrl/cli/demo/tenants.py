"""The demo's control of its tenants' processes: start, order a run, follow its events, stop."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skyrl.cli.demo.rl import Settings


class TenantFailed(RuntimeError):
    """A tenant's process ended, or reported nothing in time."""


@dataclass
class Run:
    """One run of one tenant. `rewards` and times (seconds) have one entry per step."""

    rewards: list[float] = field(default_factory=list)
    sample_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    samples: int = 0
    seconds: float | None = None

    def add(self, step: dict[str, Any]) -> None:
        self.rewards.append(step["reward"])
        self.sample_s.append(step["sample_s"])
        self.train_s.append(step["train_s"])
        self.samples += step["samples"]

    def figures(self, window: int) -> dict[str, Any]:
        """The rewards of the first and the last `window` steps, of half the steps of a short run, and their gain."""
        window = min(window, max(1, len(self.rewards) // 2))
        first, last = self.rewards[:window], self.rewards[-window:]
        return {"first": first, "last": last, "gain": (sum(last) - sum(first)) / window}

    def gain(self, window: int) -> float:
        """The mean reward of the last `window` steps minus the mean of the first. Short runs use half their steps."""
        return self.figures(window)["gain"]


class Tenant:
    """One process of `skyrl.cli.demo.tenant`. The terminal's Ctrl-C does not reach it; `stop` ends it."""

    def __init__(self, name: str, task: str, log_dir: Path) -> None:
        self.name = name
        self._log = log_dir / f"tenant-{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "skyrl.cli.demo.tenant", task, f"tml-demo-{name}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_up(self) -> None:
        """Wait until the process has done its imports."""
        self._next(60)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        """The next event. A process that reports nothing for so long is killed."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            log = self._log.read_text()[-2000:]
            raise TenantFailed(f"tenant {self.name} ended, or reported nothing for {timeout_s:.0f} s: {log}")
        return json.loads(line)

    def start(self, base_url: str, base_model: str, settings: Settings) -> None:
        assert self._process.stdin is not None
        order = {"base_url": base_url, "base_model": base_model, "settings": asdict(settings)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def follow(self, run: Run, on_step: Callable[[], None]) -> None:
        """Add the events of the ordered run to `run` until it is done. Raises TenantFailed."""
        while (event := self._next(180))["event"] != "done":
            run.add(event)
            on_step()
        run.seconds = event["seconds"]

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.kill()
        with self._process:  # waits, and closes the pipes
            pass
