"""Watches the start of a server until it is ready for the first time: shows what each process does, and finds out when
a start is hopeless.

Does not start or stop processes. After the server was ready once, processes that end are simply started again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher.progress import READY, stages, until_ready
from skyrl.runtime.processes.startup import Cause, FirstStarts, StartupError
from skyrl.runtime.processes.systemd import Systemd

logger = logging.getLogger(__name__)

SHOWN_LINES, MAX_LINE = 8, 200
"""How many lines of a log an error shows, and how many characters of each line."""


class Supervised(Protocol):
    """A process that is started again each time it ends."""

    @property
    def running_s(self) -> float | None: ...

    def log_tail(self, lines: int = 20) -> str: ...

    def give_up(self) -> None: ...


class StartObserver(Protocol):
    """Is told what runs and what has ended."""

    def watch(self, name: str, process: Supervised) -> None: ...

    def ended(self, name: str, code: int, cause: Cause | None) -> None: ...


class FirstReady:
    """Watches the start of one server."""

    def __init__(self, config: ServerConfig, logs: Path, systemd: Systemd) -> None:
        self._config = config
        self._logs = logs
        self._systemd = systemd
        self._processes: dict[str, Supervised] = {}
        self._started_at = time.monotonic()
        self._ready = False
        self._were_ready: set[str] = set()
        """Processes that were ready once. The server may still wait for another process, or for an external inference
        server."""
        self._starts = FirstStarts()
        self._last_causes: dict[str, str] = {}
        """By process: why it last ended before the server was ready."""
        self._failure: StartupError | None = None
        self._hopeless = asyncio.Event()

    def watch(self, name: str, process: Supervised) -> None:
        """Show from now on what this process does."""
        self._processes[name] = process

    def ended(self, name: str, code: int, cause: Cause | None) -> None:
        """Tell that a process has ended by itself. If its start is hopeless, and neither the process nor the server was
        ready before, `until_hopeless` raises."""
        if self._ready:
            return
        process = self._processes[name]
        last_line = process.log_tail(1) or f"it ended with {code}"
        self._last_causes[name] = cause.sentence if cause is not None else last_line[:MAX_LINE]
        hopeless = name not in self._were_ready and self._starts.hopeless(name, cause)
        if hopeless and self._failure is None:
            process.give_up()
            log_end = "\n".join(line[:MAX_LINE] for line in process.log_tail(SHOWN_LINES).splitlines())
            self._failure = StartupError(self._last_causes[name], str(self._logs / f"{name}.log"), log_end)
            self._hopeless.set()

    async def until_hopeless(self) -> None:
        """Wait until the start of a process is hopeless, so that the server can never become ready. Raises StartupError
        then."""
        await self._hopeless.wait()
        assert self._failure is not None
        raise self._failure

    async def announce(self) -> None:
        """Show what each process does until the server is ready. Then log that it is ready, and tell systemd."""
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._config.port}"
        missing = await until_ready(url, self._stages, self._missing)
        self._ready = True
        still = f" ({'; '.join(missing)})" if missing else ""
        self._systemd.ready(f"ready at {url}{still}")
        logger.info("ready at %s after %.1f s%s", url, time.monotonic() - self._started_at, still)

    def _stages(self, reasons: list[str] | None) -> dict[str, str]:
        times = {name: process.running_s for name, process in self._processes.items()}
        running_s = {name: seconds for name, seconds in times.items() if seconds is not None}
        stage_of = stages(list(self._processes), reasons, running_s)
        self._were_ready |= {name for name, stage in stage_of.items() if stage == READY}
        self._systemd.status("; ".join(f"{name}: {stage}" for name, stage in stage_of.items()))
        return stage_of

    def _missing(self, reasons: list[str] | None) -> str:
        last_ends = [f"{name} last ended with: {cause}" for name, cause in self._last_causes.items()]
        missing = ["the API is starting"] if reasons is None else reasons
        return f"{'; '.join([*missing, *last_ends])} (logs: {self._logs})"
