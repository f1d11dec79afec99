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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO

import httpx

from skyrl.config import ConfigError, ServerConfig
from skyrl.db.database import Database
from skyrl.db.migrate import migrate
from skyrl.db.stores import claim_store
from skyrl.inference.placement import LocalPlacement, Placement, ServerHandle, free_port
from skyrl.inference.vllm_client import VllmClient
from skyrl.inference.vllm_command import cuda_devices, plugin_installed, vllm_spec
from skyrl.inference.watchdog import Watchdog
from skyrl.listening import listen
from skyrl.ownership import TrainingClaim, server_id
from skyrl.runtime import RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, Runtime, set_up_process
from skyrl.supervision import SupervisedProcess

logger = logging.getLogger(__name__)

API_GRACE_S = 15.0
ENGINE_GRACE_S = 20.0
INFERENCE_GRACE_S = 5.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.2, 10.0
"""Between two questions whether the server is ready: an inference server of somebody else's may be away for days."""
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


class Launcher:
    """The processes of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._logs = config.state_dir / "logs"
        self._placement: Placement = LocalPlacement(self._logs)
        self._started_at = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; returns when no process of this server is left."""
        config = self._config
        with ExitStack() as held:
            sockets = [held.enter_context(opened) for opened in listen(config.host, config.port)]
            database = held.enter_context(closing(Database(config.database)))
            await asyncio.to_thread(migrate, database)
            name, holding = server_id(config.state_dir), None
            if config.backend != "none":
                await asyncio.to_thread(claim_store, config, database, name)
                claim = TrainingClaim(database, name)
                await claim.take()
                held.callback(claim.release)
                holding = asyncio.create_task(claim.hold())
                holding.add_done_callback(lambda _: stop.set())
            try:
                with private_directory(config.state_dir) as directory:
                    await self._run_processes(stop, directory, name, sockets)
            finally:
                if holding is not None:
                    holding.cancel()
                    await asyncio.gather(holding, return_exceptions=True)

    async def _run_processes(
        self, stop: asyncio.Event, directory: Path, name: str, sockets: list[socket.socket]
    ) -> None:
        config = self._config
        inference: ServerHandle | None = None
        watching: list[asyncio.Task[None]] = []
        key = config.external_inference_api_key
        if config.manages_inference:
            if not plugin_installed():
                raise ConfigError(
                    "vLLM would not find skyrl's plugin, without which adapters are mixed up on a CPU: install skyrl "
                    "(`pip install -e .`), do not just put it on PYTHONPATH"
                )
            key = secrets.token_urlsafe(32)
            port = config.backend_config.inference.port or free_port()
            devices = cuda_devices()
            spec = vllm_spec(config, port, key, cuda=bool(devices), devices=devices, directory=directory)
            inference = await self._placement.start(spec)
            watching.append(asyncio.create_task(self._watch(inference, key)))
        runtime = Runtime(config, directory, inference.url if inference is not None else None, key, name)
        environment = {
            RUNTIME_ENV: str(runtime.write()),
            "OMP_NUM_THREADS": str(config.threads),
            "PYTHONDONTWRITEBYTECODE": "",  # torch and transformers take twice as long to import without byte code
        }

        def restore(_: int) -> None:
            try:
                runtime.restore()
            except OSError as error:
                logger.error("what a process needs to start again cannot be written: %s", error)

        apis = [self._api(slot, environment, sockets, restore) for slot in range(config.api_processes)]
        trains = config.backend != "none"
        engines = [self._process("engine", "skyrl.engine.main", environment, restore)] if trains else []
        running = [asyncio.create_task(process.run()) for process in (*apis, *engines)]
        watching.append(asyncio.create_task(self._announce()))
        try:
            await stop.wait()
        finally:
            for task in watching:
                task.cancel()
            logger.info("stopping")
            await asyncio.gather(*(api.stop(API_GRACE_S) for api in apis))
            for opened in sockets:
                opened.close()  # nobody is to wait for an API that will not come
            for engine in engines:
                await engine.stop(ENGINE_GRACE_S)
            if inference is not None:
                await self._placement.stop(inference, INFERENCE_GRACE_S)
            await asyncio.gather(*running, *watching, return_exceptions=True)

    def _api(
        self, slot: int, environment: dict[str, str], sockets: list[socket.socket], on_exit: Callable[[int], None]
    ) -> SupervisedProcess:
        numbers = [opened.fileno() for opened in sockets]
        own = {SLOT_ENV: str(slot), SOCKETS_ENV: ",".join(map(str, numbers))}
        name = "api" if slot == 0 else f"api-{slot}"
        return self._process(name, "skyrl.api.server", environment | own, on_exit, numbers)

    def _process(
        self,
        name: str,
        module: str,
        environment: dict[str, str],
        on_exit: Callable[[int], None],
        pass_fds: Sequence[int] = (),
    ) -> SupervisedProcess:
        log = self._logs / f"{name}.log"
        return SupervisedProcess(name, _python(module), environment, log, on_exit=on_exit, pass_fds=pass_fds)

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
        """Say once when the server is ready, and every 30 s before that what is missing."""
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._config.port}"
        said = time.monotonic()
        pause_s = FIRST_LOOK_S
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while True:
                reasons = ["the API is starting"]
                with suppress(httpx.TransportError):
                    answer = await client.get(f"{url}/readyz")
                    if answer.status_code == httpx.codes.OK:
                        logger.info("ready at %s after %.1f s", url, time.monotonic() - self._started_at)
                        return
                    reasons = answer.json()["reasons"]
                if time.monotonic() - said > 30:
                    said = time.monotonic()
                    logger.info("not ready yet: %s (logs: %s)", "; ".join(reasons), self._logs)
                await asyncio.sleep(pause_s)
                pause_s = min(1.05 * pause_s, LONGEST_LOOK_S)


async def _main(config: ServerConfig) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    await Launcher(config).run(stop)


def serve(config: ServerConfig) -> None:
    """Run a server in the foreground until SIGTERM, SIGINT or SIGHUP.

    Raises ConfigError (port, state directory, options of vLLM) and SchemaError (a database from a newer version).
    """
    set_up_process(config)
    with lock_state_dir(config.state_dir):
        logger.info(
            "serving %s on %s:%d, state in %s",
            config.served_names[0],
            config.host,
            config.port,
            config.state_dir,
        )
        asyncio.run(_main(config))
