"""`skyrl serve`: starts and supervises the API, the engine and vLLM as siblings, so that each survives the others.

Knows processes and the order in which they go. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from skyrl.config.server import ConfigError, ServerConfig
from skyrl.db.database import Database
from skyrl.db.migrate import migrate
from skyrl.db.store_ownership import claim_store
from skyrl.inference.placement import LocalPlacement, Placement, ServerHandle, free_port
from skyrl.inference.vllm_client import VllmClient
from skyrl.inference.vllm_command import NO_PROGRESS_BARS, OFFLINE, options_named, vllm_spec
from skyrl.inference.watchdog import Watchdog
from skyrl.launcher.preflight import Findings, check
from skyrl.launcher.progress import READY, stages, until_ready
from skyrl.launcher.runtime import RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, Runtime, set_up_process
from skyrl.launcher.training_claim import TrainingClaim, server_id
from skyrl.processes.listening import listen
from skyrl.processes.startup import TAIL_LINES, Cause, FirstStarts, StartupError, cause_of_own, cause_of_vllm
from skyrl.processes.supervision import SupervisedProcess
from skyrl.storage.space import watch_disk

logger = logging.getLogger(__name__)

API_GRACE_S = 15.0
ENGINE_GRACE_S = 20.0
INFERENCE_GRACE_S = 5.0
SHOWN_LINES, LONGEST_WORDS = 8, 200
"""Lines of a log, and characters of each, that an error shows."""
LONGEST_TMPDIR = 50
"""A socket's path has 107 characters at most, and vLLM names its own by UUIDs."""


def lock_state_dir(state_dir: Path) -> IO[str]:
    """One server per state directory. A new one is for this user alone: it will hold prompts, weights and secrets.

    Raises ConfigError when another server holds it, or it cannot be written to.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"state-dir: cannot write to {state_dir} ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(f"state-dir: another skyrl server is running in {state_dir}") from error
    if state_dir.stat().st_mode & 0o077:
        logger.warning("other users may enter %s; unless that is meant: chmod 700 %s", state_dir, state_dir)
    return lock


@contextmanager
def private_directory(state_dir: Path) -> Iterator[Path]:
    """A directory for sockets and secrets that only this user may enter; `state_dir/run` leads to it. Gone at exit.

    It is locked, which keeps those who tidy temporary directories (systemd-tmpfiles) off a server that runs for weeks.
    """
    run = state_dir / "run"
    if run.is_symlink():
        _remove_unlocked(run.readlink())
        run.unlink()
    parent = None if len(tempfile.gettempdir()) <= LONGEST_TMPDIR else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="skyrl-", dir=parent))
    run.symlink_to(directory)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(descriptor)
        shutil.rmtree(directory, ignore_errors=True)
        run.unlink()


def _remove_unlocked(directory: Path) -> None:
    """Remove what a killed launcher left, unless a server lives there: `state_dir` may be a copy of that one's."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(descriptor)


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


class ServerEnded(RuntimeError):
    """Something that must run as long as the server has ended by itself. The server was stopped in order."""


class Launcher:
    """The processes of one server. `found`: what the checks before the start have found out about this machine."""

    def __init__(self, config: ServerConfig, found: Findings) -> None:
        self._config = config
        self._found = found
        self._logs = config.state_dir / "logs"
        self._placement: Placement = LocalPlacement(self._logs)
        self._inference: ServerHandle | None = None
        self._processes: dict[str, SupervisedProcess] = {}
        self._started_at = time.monotonic()
        self._ready = False
        self._were_ready: set[str] = set()
        """Processes that have done their part, also if the server waits for another, or for somebody else's vLLM."""
        self._starts = FirstStarts()
        self._last_words: dict[str, str] = {}
        """By process: why it last ended before the server was ready."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; returns when no process of this server is left.

        Raises ConfigError (port, database, options of vLLM), StartupError when the server can never become ready, and
        ServerEnded; also then no process is left.
        """
        config = self._config
        with ExitStack() as held:
            sockets = [held.enter_context(opened) for opened in listen(config.host, config.port)]
            database = held.enter_context(closing(Database(config.database)))
            await asyncio.to_thread(migrate, database)
            name, watching = server_id(config.state_dir), dict[asyncio.Task[None], str]()
            if config.modes.trains:
                await asyncio.to_thread(claim_store, config, database, name)
                claim = TrainingClaim(database, name)
                await claim.take()
                held.callback(claim.release)
                watching[asyncio.create_task(claim.hold())] = "renewing the claim to the database"
                if stop.is_set():  # taking it may have waited for another server's signs of life
                    await _cancelled(watching)
                    return
            try:
                with private_directory(config.state_dir) as directory:
                    await self._run_processes(stop, directory, name, sockets, watching)
            finally:
                await _cancelled(watching)

    async def _run_processes(
        self,
        stop: asyncio.Event,
        directory: Path,
        name: str,
        sockets: list[socket.socket],
        watching: dict[asyncio.Task[None], str],
    ) -> None:
        config = self._config
        self._hopeless: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        key = config.external_inference_api_key
        if config.modes.manages_inference:
            key = secrets.token_urlsafe(32)
            self._inference = await self._start_inference(key, directory)
            watching[asyncio.create_task(self._inference.supervised())] = "supervising vLLM"
            watching[asyncio.create_task(self._watch(self._inference, key))] = "watching whether vLLM hangs"
        url = self._inference.url if self._inference is not None else None
        runtime = Runtime(config, directory, url, key, name)
        environment = {
            RUNTIME_ENV: str(runtime.write()),
            "OMP_NUM_THREADS": str(config.threads),
            "PYTHONDONTWRITEBYTECODE": "",  # torch and transformers take twice as long to import without byte code
            **NO_PROGRESS_BARS,
            **(OFFLINE if self._found.offline else {}),
        }

        def restore() -> None:
            try:
                runtime.restore()
            except OSError as error:
                logger.error("what a process needs to start again cannot be written: %s", error)

        apis = [self._api(slot, environment, sockets, restore) for slot in range(config.api_processes)]
        engines = [self._process("engine", "skyrl.engine.main", environment, restore)] if config.modes.trains else []
        for process in (*apis, *engines):
            watching[asyncio.create_task(process.run())] = f"supervising {process.name}"
        watching[asyncio.create_task(watch_disk(config.state_dir))] = "watching the free space on the disk"
        announcing = asyncio.create_task(self._announce())
        try:
            await self._until_over(stop, announcing, watching)
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            if not self._hopeless.cancel():  # from now on nobody asks why a process ends
                self._hopeless.exception()
            logger.info("stopping; this takes at most %.0f s", API_GRACE_S + ENGINE_GRACE_S + INFERENCE_GRACE_S)
            await asyncio.gather(*(_in_order(api.name, api.stop(API_GRACE_S)) for api in apis))
            for opened in sockets:
                opened.close()  # nobody is to wait for an API that will not come
            for engine in engines:
                await _in_order(engine.name, engine.stop(ENGINE_GRACE_S))
            if self._inference is not None:
                await _in_order("vllm", self._placement.stop(self._inference, INFERENCE_GRACE_S))

    async def _start_inference(self, key: str, directory: Path) -> ServerHandle:
        config, devices = self._config, self._found.devices
        spec = vllm_spec(
            config,
            config.backend_config.inference.port or free_port(),
            key,
            cuda=bool(devices),
            devices=devices,
            directory=directory,
            offline=self._found.offline,
            tested=self._found.vllm_tested,
        )
        return await self._placement.start(spec, self._inference_ended)

    async def _until_over(
        self, stop: asyncio.Event, announcing: asyncio.Task[None], watching: dict[asyncio.Task[None], str]
    ) -> None:
        """Return when `stop` is set. Raises StartupError, and ServerEnded when one of `watching` ends by itself."""
        stopping = asyncio.create_task(stop.wait())
        ends: set[asyncio.Future[Any]] = {stopping, self._hopeless, *watching}
        try:
            done, _ = await asyncio.wait({*ends, announcing}, return_when=asyncio.FIRST_COMPLETED)
            if done == {announcing}:
                if (failure := announcing.exception()) is not None:
                    raise ServerEnded(f"waiting until the server is ready has failed: {failure}") from failure
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if stopping in done:
            return
        if self._hopeless in done:
            await self._hopeless
        ended = next(task for task in watching if task in done)
        failure = ended.exception()
        raise ServerEnded(f"{watching[ended]} has ended, without which no server is to run: {failure or 'see above'}")

    def _inference_ended(self, code: int) -> None:
        assert self._inference is not None
        cause = cause_of_vllm(code, self._inference.log_tail(TAIL_LINES))
        if cause is not None:
            named = options_named(self._config, cause.sentence)
            said = f"{named}: vLLM refuses it: {cause.sentence}" if named else f"vLLM cannot start: {cause.sentence}"
            cause = Cause(said, cause.final)
        self._ended("vllm", code, cause, self._inference)

    def _ended(self, name: str, code: int, cause: Cause | None, process: SupervisedProcess | ServerHandle) -> None:
        """A process has ended by itself. One that can never start ends the server, unless it or the server was ready
        before."""
        if self._ready:
            return
        last_line = process.log_tail(1) or f"it ended with {code}"
        self._last_words[name] = cause.sentence if cause is not None else last_line[:LONGEST_WORDS]
        hopeless = name not in self._were_ready and self._starts.hopeless(name, cause)
        if hopeless and not self._hopeless.done():
            process.give_up()
            end = "\n".join(line[:LONGEST_WORDS] for line in process.log_tail(SHOWN_LINES).splitlines())
            log = self._logs / f"{name}.log"
            self._hopeless.set_exception(StartupError(self._last_words[name], str(log), end))

    def _api(
        self, slot: int, environment: dict[str, str], sockets: list[socket.socket], restore: Callable[[], None]
    ) -> SupervisedProcess:
        numbers = [opened.fileno() for opened in sockets]
        own = {SLOT_ENV: str(slot), SOCKETS_ENV: ",".join(map(str, numbers))}
        name = "api" if slot == 0 else f"api-{slot}"
        return self._process(name, "skyrl.api.server", environment | own, restore, numbers)

    def _process(
        self,
        name: str,
        module: str,
        environment: dict[str, str],
        restore: Callable[[], None],
        pass_fds: Sequence[int] = (),
    ) -> SupervisedProcess:
        def ended(code: int) -> None:
            restore()
            self._ended(name, code, cause_of_own(code, process.log_tail(TAIL_LINES)), process)

        log = self._logs / f"{name}.log"
        process = SupervisedProcess(name, _python(module), environment, log, on_exit=ended, pass_fds=pass_fds)
        self._processes[name] = process
        return process

    async def _watch(self, server: ServerHandle, key: str) -> None:
        options = self._config.backend_config.inference
        client = VllmClient(server.url, key)
        watchdog = Watchdog(
            client,
            server,
            interval_s=options.probe_interval_s,
            health_timeout_s=options.health_timeout_s,
            step_timeout_s=options.step_timeout_s,
        )
        try:
            await watchdog.run()
        finally:
            await client.close()

    async def _announce(self) -> None:
        """Show what each process does until the server is ready, and say so."""
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._config.port}"
        await until_ready(url, self._stages, self._missing)
        self._ready = True
        logger.info("ready at %s after %.1f s", url, time.monotonic() - self._started_at)

    def _stages(self, reasons: list[str] | None) -> dict[str, str]:
        names, running_s = [*self._processes], {name: p.running_s for name, p in self._processes.items()}
        if self._inference is not None:
            names.append("vllm")
            running_s["vllm"] = self._inference.running_s
        doing = stages(names, reasons, {name: seconds for name, seconds in running_s.items() if seconds is not None})
        self._were_ready |= {name for name, stage in doing.items() if stage == READY}
        return doing

    def _missing(self, reasons: list[str] | None) -> str:
        last = [f"{name} last ended with: {words}" for name, words in self._last_words.items()]
        missing = ["the API is starting"] if reasons is None else reasons
        return f"{'; '.join([*missing, *last])} (logs: {self._logs})"


async def _in_order(name: str, stopping: Awaitable[None]) -> None:
    """Stop one process. Whatever goes wrong with it, those after it are stopped too."""
    try:
        await stopping
    except Exception:
        logger.exception("stopping %s failed", name)


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _main(config: ServerConfig, found: Findings) -> None:
    stop = asyncio.Event()

    def hear() -> None:
        if stop.is_set():
            logger.warning("already stopping: what still runs is waited for, and killed when its time is over")
        stop.set()

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(name, hear)
    await Launcher(config, found).run(stop)


def serve(config: ServerConfig) -> None:
    """Run a server in the foreground until SIGTERM, SIGINT or SIGHUP.

    Raises ConfigError (base model, port, state directory, options of vLLM), SchemaError (a database from a newer
    version), DatabaseAway, StartupError (a process can never start) and ServerEnded.
    """
    set_up_process(config)
    found = check(config)
    with lock_state_dir(config.state_dir):
        logger.info(
            "serving %s on %s:%d, state in %s",
            config.served_names[0],
            config.host,
            config.port,
            config.state_dir,
        )
        asyncio.run(_main(config, found))
        logger.info("stopped")
