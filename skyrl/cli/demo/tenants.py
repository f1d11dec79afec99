"""The demo's control of its tenants' processes: start, order a run, follow its events, stop; and the live view of both.

The view shows rewards, samples and training steps, and which process served the samples.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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

    def gain(self, window: int) -> float:
        """The mean reward of the last `window` steps minus the mean of the first. Short runs use half their steps."""
        window = min(window, max(1, len(self.rewards) // 2))
        return sum(self.rewards[-window:]) / window - sum(self.rewards[:window]) / window


class Tenant:
    """One process of `skyrl.cli.demo.tenant`. The terminal's Ctrl-C does not reach it; `stop` ends it."""

    def __init__(self, name: str, task: str, log_dir: Path) -> None:
        self.name = name
        self.task = task
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
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"tenant-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def wait_up(self) -> None:
        """Wait until the process has done its imports."""
        self._next(60)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TenantFailed(f"tenant {self.name} reported nothing for {timeout_s:.0f} s") from error
        if event is None:
            raise TenantFailed(f"tenant {self.name} ended: {self._log.read_text()[-2000:]}")
        return event

    def start(self, base_url: str, base_model: str, settings: Settings) -> None:
        assert self._process.stdin is not None
        order = {"base_url": base_url, "base_model": base_model, "settings": asdict(settings)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def follow(self, run: Run, on_step: Callable[[], None]) -> None:
        """Add the events of the ordered run to `run` until it is done. Raises TenantFailed."""
        while True:
            event = self._next(180)
            if event["event"] == "done":
                run.seconds = event["seconds"]
                return
            run.add(event)
            on_step()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Values in [0, 1] as block characters, the newest on the right."""
    return "".join(BARS[min(len(BARS) - 1, int(max(0.0, value) * len(BARS)))] for value in values[-width:])


def live_view(title: str, runs: dict[str, tuple[str, Run]], steps: int, status: dict[str, Any]) -> RenderableType:
    """`runs`: tenant -> (task, run so far). `status`: the server's `/statusz`."""
    table = Table(expand=True, box=None, header_style="bold")
    for column in ("tenant", "task", "reward", "", "steps", "samples", "sample s", "train s"):
        table.add_column(column, justify="left" if column in ("tenant", "task", "") else "right")
    for name, (task, run) in runs.items():
        table.add_row(
            name,
            task,
            f"{run.rewards[-1]:.2f}" if run.rewards else "–",
            Text(sparkline(run.rewards), style="green"),
            f"{len(run.rewards)}/{steps}",
            str(run.samples),
            f"{run.sample_s[-1]:.2f}" if run.sample_s else "–",
            f"{run.train_s[-1]:.2f}" if run.train_s else "–",
        )
    samples = status.get("samples", {})
    served = (
        f"samples served by vLLM, forwarded by the API: [bold]{samples.get('forwarded', 0)}[/]   "
        f"through the engine loop: [bold]{samples.get('engine', 0)}[/]   in flight: {samples.get('in_flight', 0)}"
    )
    return Panel(Group(table, Text.from_markup(served)), title=title)
