"""Watches the start of a server until it is ready for the first time: shows what each process does, and finds out when
a start is hopeless.

Does not start or stop processes. After the server was ready once, processes that end are simply started again. With
several base models, each is watched until it was ready once; one whose start is hopeless is given up, and the others
go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher.base_model_start import BaseModelStart, Supervised
from skyrl.cli.launcher.progress import READY, stages, until_ready
from skyrl.runtime.processes.startup import Cause, FirstStarts, StartupError
from skyrl.runtime.processes.systemd import Systemd
from skyrl.storage.db.engine_state import EngineState

logger = logging.getLogger(__name__)

SHOWN_LINES, MAX_LINE = 8, 200
"""How many lines of a log an error shows, and how many characters of each line."""


class StartObserver(Protocol):
    """Is told what runs and what has ended."""

    def watch(self, name: str, process: Supervised) -> None: ...

    def ended(self, name: str, code: int, cause: Cause | None) -> None: ...


class FirstReady:
    """Watches the start of one server. `base_models` are the configurations of its base models."""

    def __init__(self, config: ServerConfig, base_models: Sequence[ServerConfig], logs: Path, systemd: Systemd) -> None:
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
        several = base_models if config.base_models else ()
        self.starts = {part.role.number: BaseModelStart(part, self._ended_of) for part in several}
        """The starts of several base models, by number; empty if the server has one."""
        self._given_up: asyncio.Queue[BaseModelStart] = asyncio.Queue()

    def observer(self, part: ServerConfig) -> StartObserver:
        """Who is told of the processes of a base model."""
        return self.starts.get(part.role.number, self)

    def watch(self, name: str, process: Supervised) -> None:
        """Show from now on what this process does."""
        self._processes[name] = process

    def ended(self, name: str, code: int, cause: Cause | None) -> None:
        """Tell that a process has ended by itself. If its start is hopeless, and neither the process nor the server was
        ready before, `until_hopeless` raises."""
        if self._ready:
            return
        process = self._processes[name]
        failure = self._hopeless_end(name, process, code, cause)
        if failure is not None and self._failure is None:
            process.give_up()
            self._fail(failure)

    def _ended_of(self, start: BaseModelStart, name: str, code: int, cause: Cause | None) -> None:
        """The same for a process of one base model of several. If its start is hopeless, its base model is given up;
        `until_hopeless` raises if no base model is left that this server runs."""
        if start.was_ready or start.failure is not None:
            return
        start.failure = self._hopeless_end(name, start.processes[name], code, cause)
        if start.failure is None:
            return
        if any(other.can_serve for other in self.starts.values()):
            self._given_up.put_nowait(start)
            if self._ready:
                self._systemd.status(f"ready at {self._url}{self._still([])}")
        elif self._failure is None:
            start.processes[name].give_up()
            self._fail(start.failure)

    def _hopeless_end(self, name: str, process: Supervised, code: int, cause: Cause | None) -> StartupError | None:
        """Remember why a process has ended. Returns the error if a further start of it is hopeless."""
        last_line = process.log_tail(1) or f"it ended with {code}"
        self._last_causes[name] = cause.sentence if cause is not None else last_line[:MAX_LINE]
        if name in self._were_ready or not self._starts.hopeless(name, cause):
            return None
        log_end = "\n".join(line[:MAX_LINE] for line in process.log_tail(SHOWN_LINES).splitlines())
        return StartupError(self._last_causes[name], str(self._logs / f"{name}.log"), log_end)

    def _fail(self, failure: StartupError) -> None:
        self._failure = failure
        self._hopeless.set()

    async def next_given_up(self) -> BaseModelStart:
        """Wait until the start of one more base model is hopeless while others may still start. Its processes are to be
        stopped."""
        return await self._given_up.get()

    def look(self, states: Mapping[int, EngineState]) -> None:
        """Learn what the base models do, from their rows by number."""
        for number, state in states.items():
            start = self.starts[number]
            was_ready = start.was_ready
            start.look(state)
            self._note_ready(start.stages())
            if self._ready and start.was_ready and not was_ready:
                logger.info("%s is ready", start.name)

    async def until_hopeless(self) -> None:
        """Wait until the start of a process is hopeless, so that the server can never become ready. Raises StartupError
        then."""
        await self._hopeless.wait()
        assert self._failure is not None
        raise self._failure

    async def announce(self) -> None:
        """Show what each process does until the server is ready. Then log that it is ready, and tell systemd."""
        reasons = await until_ready(self._url, self._stages, self._missing)
        self._ready = True
        still = self._still(reasons)
        self._systemd.ready(f"ready at {self._url}{still}")
        logger.info("ready at %s after %.1f s%s", self._url, time.monotonic() - self._started_at, still)

    @property
    def _url(self) -> str:
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._config.port}"

    def _still(self, reasons: Sequence[str]) -> str:
        """What a ready server lacks, in parentheses: the reasons that `/readyz` gives, and the base models that were
        given up, if the reasons do not say so."""
        said = " ".join(reasons)
        failures = {start.name: str(start.failure) for start in self.starts.values() if start.failure is not None}
        missing = [*reasons, *(f"{name} has not started: {why}" for name, why in failures.items() if why not in said)]
        return f" ({'; '.join(missing)})" if missing else ""

    def _stages(self, reasons: list[str] | None) -> dict[str, str]:
        times = {name: process.running_s for name, process in self._processes.items()}
        running_s = {name: seconds for name, seconds in times.items() if seconds is not None}
        shared = [] if reasons and self.starts else reasons  # base models tell their own
        stage_of = stages(list(self._processes), shared, running_s)
        self._note_ready(stage_of)
        for start in self.starts.values():
            stage_of |= start.stages()
        self._systemd.status("; ".join(f"{name}: {stage}" for name, stage in stage_of.items()))
        return stage_of

    def _note_ready(self, stage_of: Mapping[str, str]) -> None:
        self._were_ready |= {name for name, stage in stage_of.items() if stage == READY}

    def _missing(self, reasons: list[str] | None) -> str:
        last_ends = [f"{name} last ended with: {cause}" for name, cause in self._last_causes.items()]
        missing = ["the API is starting"] if reasons is None else reasons
        return f"{'; '.join([*missing, *last_ends])} (logs: {self._logs})"
