"""The start of one base model of a server with several: what its processes do, whether it was ready once, and why it
was given up.

Judges by the base model's row of the table engine_state. Does not stop the processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher.progress import stages
from skyrl.runtime.processes.startup import Cause, StartupError
from skyrl.storage.db.engine_state import EngineState

GIVEN_UP = "given up"
"""The stage of a process that is not started again."""


class Supervised(Protocol):
    """A process that is started again each time it ends."""

    @property
    def running_s(self) -> float | None: ...

    def log_tail(self, lines: int = 20) -> str: ...

    def give_up(self) -> None: ...


class BaseModelStart:
    """The StartObserver of one base model's processes. `on_end(this, name, code, cause)` is called when one has ended
    by itself."""

    def __init__(self, config: ServerConfig, on_end: Callable[[BaseModelStart, str, int, Cause | None], None]) -> None:
        self.config = config
        self.processes: dict[str, Supervised] = {}
        self.was_ready = False
        """Whether it could do all that it is for, at one moment since the server began."""
        self.failure: StartupError | None = None
        """Why it was given up."""
        self._on_end = on_end
        self._reasons: list[str] | None = None

    @property
    def name(self) -> str:
        """The name that clients use, and operators know."""
        return self.config.served_names[0]

    @property
    def can_serve(self) -> bool:
        """Whether this server runs it, and has not given it up."""
        modes = self.config.modes
        return (modes.trains or modes.manages_inference) and self.failure is None

    def watch(self, name: str, process: Supervised) -> None:
        self.processes[name] = process

    def ended(self, name: str, code: int, cause: Cause | None) -> None:
        self._on_end(self, name, code, cause)

    def look(self, state: EngineState) -> None:
        """Learn from its row."""
        reasons: list[str] = []
        if self.config.modes.trains and not state.training_ready:
            reasons.append(f"training: {state.reason}")
        if self.config.modes.manages_inference and state.inference_proxy_url is None:
            reasons.append("sampling: no inference server has been published")
        self._reasons = reasons
        self.was_ready = self.was_ready or not reasons

    def stages(self) -> dict[str, str]:
        """What each process does, by name."""
        if self.failure is not None:
            return dict.fromkeys(self.processes, GIVEN_UP)
        times = {name: process.running_s for name, process in self.processes.items()}
        running_s = {name: seconds for name, seconds in times.items() if seconds is not None}
        return stages(list(self.processes), self._reasons, running_s)
