"""Watches the start of a server until it is ready for the first time: shows what each process does, and finds out when
a start is hopeless.

`FirstReady` does not start or stop processes. After the server was ready once, processes that end are simply started
again. With several base models, each is watched until it was ready once (`BaseModelStart` judges by the base model's
row of the table engine_state). `BaseModelsWatch` stops the processes of one whose start is hopeless, and the others
serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher.parts import Part, Parts
from skyrl.cli.launcher.progress import READY, stages, until_ready
from skyrl.runtime.processes.startup import Cause, FirstStarts, StartupError
from skyrl.runtime.processes.systemd import Systemd
from skyrl.storage.db import engine_state
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.engine_state import EngineState
from skyrl.storage.db.repeats import Rounds

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


LOOK_S = 1.0


class BaseModelsWatch:
    """`names` has the names of the base models' parts, by number."""

    def __init__(
        self, first_ready: FirstReady, parts: Parts, names: Mapping[int, Sequence[str]], database: Database
    ) -> None:
        self._first_ready = first_ready
        self._parts = parts
        self._names = names
        self._database = database

    def parts(self) -> list[Part]:
        return [
            Part("base models", supervise=self._look, duty="watching the starts of the base models"),
            Part("given up", supervise=self._give_up, duty="stopping base models that cannot start"),
        ]

    async def _look(self) -> None:
        """Read the rows until each base model was ready once or is given up."""
        rounds = Rounds("reading what the base models do", LOOK_S)
        while starting := [s for s in self._first_ready.starts.values() if not s.was_ready and s.failure is None]:
            try:
                states = await self._database.read_async(lambda c, starting=starting: _states(c, starting))
            except Exception as error:  # logged; the watch must go on
                rounds.failed(error)
            else:
                rounds.went_well()
                self._first_ready.look(states)
            await asyncio.sleep(LOOK_S)
        await asyncio.Event().wait()  # a part's duty ends with the server

    async def _give_up(self) -> None:
        while True:
            start = await self._first_ready.next_given_up()
            failure = start.failure
            assert failure is not None
            logger.error(
                "%s cannot start and is given up until the server starts again; the other base models serve: %s\n\n"
                "the end of %s:\n%s",
                start.name,
                failure,
                failure.log,
                failure.log_end,
            )
            await self._parts.drop(self._names[start.config.role.number])
            await self._publish(start, str(failure))

    async def _publish(self, start: BaseModelStart, reason: str) -> None:
        """Write into its row why it is missing, for the API. Tries until the database takes it."""
        rounds, key = Rounds("publishing that a base model cannot start", LOOK_S), start.config.role.state_keys[0]
        while True:
            try:
                await asyncio.to_thread(self._database.write, lambda c: engine_state.clear(c, reason, key))
            except Exception as error:  # logged; tried until the database takes it
                rounds.failed(error)
                await asyncio.sleep(LOOK_S)
            else:
                rounds.went_well()
                return


def _states(connection: Connection, starts: Sequence[BaseModelStart]) -> dict[int, EngineState]:
    roles = [start.config.role for start in starts]
    return {role.number: engine_state.read_state(connection, role.state_keys[:1]) for role in roles}
