"""What happens until a server is ready for the first time: what each process does, and which start is hopeless.

Knows processes by name, how long they run and how they end. Does not start or stop any. After the server was ready
once, no end of a process is hopeless.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from skyrl.config.server import ServerConfig
from skyrl.launcher.progress import READY, stages, until_ready
from skyrl.processes.startup import Cause, FirstStarts, StartupError

logger = logging.getLogger(__name__)

SHOWN_LINES, LONGEST_WORDS = 8, 200
"""Lines of a log, and characters of each, that an error shows."""


class Supervised(Protocol):
    """A process that is started again whenever it ends."""

    @property
    def running_s(self) -> float | None: ...

    def log_tail(self, lines: int = 20) -> str: ...

    def give_up(self) -> None: ...


class FirstReady:
    """Watches the start of one server."""

    def __init__(self, config: ServerConfig, logs: Path) -> None:
        self._config = config
        self._logs = logs
        self._processes: dict[str, Supervised] = {}
        self._began = time.monotonic()
        self._ready = False
        self._were_ready: set[str] = set()
        """Processes that have done their part, although the server may wait for another process, or for an inference
        server that it does not run."""
        self._starts = FirstStarts()
        self._last_words: dict[str, str] = {}
        """By process: why it last ended before the server was ready."""
        self._failure: StartupError | None = None
        self._hopeless = asyncio.Event()

    def watch(self, name: str, process: Supervised) -> None:
        """Show what this process does."""
        self._processes[name] = process

    def ended(self, name: str, code: int, cause: Cause | None) -> None:
        """A process has ended by itself. One that can never start ends the server, unless the process or the server was
        ready before."""
        if self._ready:
            return
        process = self._processes[name]
        last_line = process.log_tail(1) or f"it ended with {code}"
        self._last_words[name] = cause.sentence if cause is not None else last_line[:LONGEST_WORDS]
        hopeless = name not in self._were_ready and self._starts.hopeless(name, cause)
        if hopeless and self._failure is None:
            process.give_up()
            end = "\n".join(line[:LONGEST_WORDS] for line in process.log_tail(SHOWN_LINES).splitlines())
            self._failure = StartupError(self._last_words[name], str(self._logs / f"{name}.log"), end)
            self._hopeless.set()

    async def until_hopeless(self) -> None:
        """Wait until it is known that the server can never become ready. Raises StartupError then."""
        await self._hopeless.wait()
        assert self._failure is not None
        raise self._failure

    async def announce(self) -> None:
        """Show what each process does until the server is ready, and log that it is."""
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._config.port}"
        await until_ready(url, self._stages, self._missing)
        self._ready = True
        logger.info("ready at %s after %.1f s", url, time.monotonic() - self._began)

    def _stages(self, reasons: list[str] | None) -> dict[str, str]:
        running_s = {name: process.running_s for name, process in self._processes.items()}
        known = {name: seconds for name, seconds in running_s.items() if seconds is not None}
        doing = stages(list(running_s), reasons, known)
        self._were_ready |= {name for name, stage in doing.items() if stage == READY}
        return doing

    def _missing(self, reasons: list[str] | None) -> str:
        last = [f"{name} last ended with: {words}" for name, words in self._last_words.items()]
        missing = ["the API is starting"] if reasons is None else reasons
        return f"{'; '.join([*missing, *last])} (logs: {self._logs})"
