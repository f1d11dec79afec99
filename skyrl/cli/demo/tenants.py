"""The demo's tenants. Each is a process, because real tenants share only the server. It lives for several runs, so that
the measured time of a run includes no imports: a run of two steps goes before the first that is measured.
"""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl.cli.demo.rl import Settings, Step
from skyrl.cli.demo.tenant import live

SPAWN = multiprocessing.get_context("spawn")


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

    def add(self, step: Step) -> None:
        self.rewards.append(step.reward)
        self.sample_s.append(step.sample_s)
        self.train_s.append(step.train_s)
        self.samples += step.samples

    def figures(self, window: int) -> dict[str, Any]:
        """The rewards of the first and the last `window` steps, of half the steps of a short run, and their gain."""
        window = min(window, max(1, len(self.rewards) // 2))
        first, last = self.rewards[:window], self.rewards[-window:]
        return {"first": first, "last": last, "gain": (sum(last) - sum(first)) / window}

    def gain(self, window: int) -> float:
        """The mean reward of the last `window` steps minus the mean of the first. Short runs use half their steps."""
        return self.figures(window)["gain"]


class Tenant:
    """The terminal's Ctrl-C does not reach the process; `stop` ends it."""

    def __init__(self, name: str, task: str, log_dir: Path) -> None:
        self.name = name
        self._log = log_dir / f"tenant-{name}.log"
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=live, args=(theirs, task, f"tml-demo-{name}", self._log))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_up(self) -> None:
        """Wait until the process has done its imports."""
        self._next(60)

    def _next(self, timeout_s: float) -> Any:
        """What the process sends next. A process that sends nothing for so long is killed."""
        with suppress(EOFError, ConnectionError):
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        self.kill()
        log = self._log.read_text()[-2000:] if self._log.exists() else ""
        raise TenantFailed(f"tenant {self.name} ended, or reported nothing for {timeout_s:.0f} s: {log}")

    def start(self, base_url: str, base_model: str, settings: Settings) -> None:
        self._pipe.send((base_url, base_model, settings))

    def follow(self, run: Run) -> None:
        """Add the steps of the ordered run to `run` until it is done. Raises TenantFailed."""
        while isinstance(sent := self._next(180), Step):
            run.add(sent)
        run.seconds = sent

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self.kill()
        self._process.join()
