"""The parts that all base models of a server share: the API processes, Ray, the port, the claim to the database, and
the watch of the disk. Also how a process of skyrl's own is started; `base_model_parts` has those of one base model.

The claim to train on the database has the name of this server. Without the claim, two servers on one database would
each run every command. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher.first_ready import FirstReady, StartObserver
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.cli.launcher.parts import Part
from skyrl.cli.launcher.state_dir import rotate_logs
from skyrl.inference.vllm_command import NO_PROGRESS_BARS, OFFLINE, THREADS_SLEEP
from skyrl.runtime.metrics.files import MetricsDirectory, MetricsWriter
from skyrl.runtime.metrics.storage import show_free_space
from skyrl.runtime.processes.host_resources import watch_disk
from skyrl.runtime.processes.runtime import RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, Runtime
from skyrl.runtime.processes.startup import TAIL_LINES, Cause, cause_of_own, cause_of_vllm
from skyrl.runtime.processes.supervision import SupervisedProcess
from skyrl.runtime.ray_cluster.head import LocalCluster
from skyrl.storage.db import claims
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import ONLY
from skyrl.storage.db.faults import DatabaseError, reason
from skyrl.storage.db.repeats import Rounds

logger = logging.getLogger(__name__)

API_GRACE_S = 15.0
ROUTER_GRACE_S = 3.0
PLACEMENT_GRACE_S = 15.0
RAY_GRACE_S = 10.0
SIDECAR_GRACE_S = 3.0
CLAIM, CLAIM_WATCH, ENGINE, PORT, DISK, METRICS = "claim", "claim watch", "engine", "port", "disk", "metrics"
LOGS, RAY, PLACEMENT = "logs", "ray", "placement"
ROUTER, SIDECAR = "router", "sidecar"
"""Names of parts."""


def claim_parts(database: Database, server: str, state_keys: Sequence[str]) -> list[Part]:
    """The claim to train on the database, and the watch that renews it. `state_keys` are as in `TrainingClaim`."""
    claim = TrainingClaim(database, server, state_keys)

    async def release() -> None:
        await asyncio.to_thread(claim.release)

    return [
        Part(CLAIM, start=claim.take, stop=release),
        Part(CLAIM_WATCH, (CLAIM,), supervise=claim.hold, duty="renewing the claim to the database"),
    ]


def disk_part(state_dir: Path) -> Part:
    return Part(DISK, supervise=lambda: watch_disk(state_dir), duty="watching the free space on the disk")


def metrics_part(metrics: LauncherMetrics, directory: Path, state_dir: Path) -> Part:
    """Publishes the launcher's metrics, and deletes the metrics of processes that have ended."""
    published = MetricsDirectory(directory)
    writer = MetricsWriter(published, "launcher", metrics.registry, more=metrics.labelled, owns=True)
    show_free_space(metrics.registry, state_dir)

    async def start() -> None:
        writer.start()

    async def stop() -> None:
        await asyncio.to_thread(writer.stop)

    return Part(METRICS, start=start, supervise=metrics.lag.run, duty="measuring the event loop", stop=stop)


def log_part(logs: Path, config: ServerConfig) -> Part:
    """Bounds the log files of all processes."""
    rotate = partial(rotate_logs, logs, config.log_file_bytes, config.log_files_kept)
    return Part(LOGS, supervise=rotate, duty="rotating the logs")


def port_part(sockets: Sequence[socket.socket], needs: tuple[str, ...]) -> Part:
    """The sockets from which the API processes accept connections. They are closed when all API processes have ended,
    so that clients do not wait in vain for a connection."""

    async def close() -> None:
        for listener in sockets:
            listener.close()

    return Part(PORT, needs, stop=close)


class OwnProcesses:
    """Makes the parts of skyrl's own processes. `BaseModelParts` makes those of one base model, from `process` and
    `part`. `server` is the runtime of the server."""

    def __init__(
        self,
        server: Runtime,
        logs: Path,
        first_ready: FirstReady,
        *,
        offline: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is what these processes need besides what all servers' processes have. `offline`: none of them
        needs the model hub."""
        self._server = server
        self._logs = logs
        self._first_ready = first_ready
        self._offline = OFFLINE if offline else {}
        self._environment = {
            RUNTIME_ENV: str(server.write()),
            "OMP_NUM_THREADS": str(server.config.threads),
            **THREADS_SLEEP,
            "PYTHONDONTWRITEBYTECODE": "",  # without byte code the import of torch and transformers takes twice as long
            **NO_PROGRESS_BARS,
            **self._offline,
            **(environment or {}),
        }

    def ray_head(
        self, cluster: LocalCluster, devices: Sequence[str], needs: tuple[str, ...], on_end: Callable[[], None]
    ) -> Part:
        """The Ray cluster of this machine. When it ends, all that ran on it ends, and `on_end` is called."""

        def ended(code: int) -> None:
            logger.error("Ray has ended with %d, and with it all that ran on it", code)
            on_end()
            cause = cause_of_vllm(code, process.log_tail(TAIL_LINES))
            sentence = None if cause is None else Cause(f"Ray cannot start: {cause.sentence}", cause.final)
            self._first_ready.ended(RAY, code, sentence)

        log, environment = self._logs / f"{RAY}.log", {**cluster.environment(devices), **self._offline}
        process = SupervisedProcess(RAY, cluster.command(), environment, log, on_exit=ended)
        self._first_ready.watch(RAY, process)
        return self.part(process, needs, RAY_GRACE_S)

    def api(self, slot: int, sockets: Sequence[socket.socket], needs: tuple[str, ...]) -> Part:
        """The API process of this slot. It inherits the sockets and accepts connections from them."""
        descriptors = [listener.fileno() for listener in sockets]
        own_environment = {SLOT_ENV: str(slot), SOCKETS_ENV: ",".join(map(str, descriptors))}
        process = self.process(
            api_name(slot), "skyrl.api.server", self._first_ready, own_environment, pass_fds=descriptors
        )
        return self.part(process, needs, API_GRACE_S)

    def process(
        self,
        name: str,
        module: str,
        observer: StartObserver,
        own_environment: Mapping[str, str],
        *,
        offline: bool = False,
        pass_fds: Sequence[int] = (),
        on_end: Callable[[Cause | None], None] = lambda _: None,
    ) -> SupervisedProcess:
        """A process that runs a module of skyrl. `observer` and `on_end` are told when it has ended by itself, and
        why. `offline`: this process does not need the model hub."""

        def ended(code: int) -> None:
            self._restore_runtime_file()
            cause = cause_of_own(code, process.log_tail(TAIL_LINES))
            on_end(cause)
            observer.ended(name, code, cause)

        environment = {**self._environment, **(OFFLINE if offline else {}), **own_environment}
        log = self._logs / f"{name}.log"
        process = SupervisedProcess(name, _python(module), environment, log, on_exit=ended, pass_fds=pass_fds)
        observer.watch(name, process)
        return process

    @staticmethod
    def part(process: SupervisedProcess, needs: tuple[str, ...], grace_s: float) -> Part:
        return Part(
            process.name,
            needs,
            supervise=process.run,
            duty=f"supervising {process.name}",
            stop=lambda: process.stop(grace_s),
            grace_s=grace_s,
        )

    def _restore_runtime_file(self) -> None:
        """Write the file again that a process reads when it starts: somebody may have deleted it."""
        try:
            self._server.restore()
        except OSError as error:
            logger.error("what a process needs to start again cannot be written: %s", error)


def api_name(slot: int) -> str:
    return "api" if slot == 0 else f"api-{slot}"


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


CLAIM_HOLD_S = 3.0
"""How often the claim is renewed."""
CLAIM_DEAD_AFTER_S = 15.0
"""A server whose claim did not change for this long is dead."""
CLAIM_LOOK_S = 0.5
"""How often it is checked whether another server's claim has changed."""


def server_id(state_dir: Path) -> str:
    """The name of the server with this state directory. A restarted server has the same name; a server on a copy of the
    directory has another one, because the inode of the file differs. The caller holds the directory's lock."""
    file = state_dir / "server-id"
    if file.exists():
        name, _, inode = file.read_text().partition(" ")
        if inode == str(file.stat().st_ino):
            return name
        file.unlink()
    host = re.sub(r"[^\w.-]", "-", socket.gethostname())[:40]
    name = f"{host}-{secrets.token_hex(6)}"
    scratch = file.with_name(f".tmp-{secrets.token_hex(8)}")
    with scratch.open("x") as stream:
        stream.write(f"{name} {os.fstat(stream.fileno()).st_ino}")
    scratch.rename(file)
    return name


class TrainingClaim:
    """The claim of `server` to be the only server that trains on this database. `state_keys` are those of its base
    models in the table engine_state."""

    def __init__(self, database: Database, server: str, state_keys: Sequence[str] = (ONLY,)) -> None:
        self._database = database
        self._server = server
        self._state_keys = state_keys

    async def take(self) -> None:
        """Take the claim. If another server has it, watch for DEAD_AFTER_S seconds whether that server renews it.
        Raises ConfigError if it does."""
        seen = await asyncio.to_thread(self._database.read, claims.read_claim)
        if seen.owner not in (None, self._server):
            logger.info("server %s trained on this database: checking whether it still runs", seen.owner)
        deadline = time.monotonic() + CLAIM_DEAD_AFTER_S
        while seen.owner not in (None, self._server) and time.monotonic() < deadline:
            await asyncio.sleep(CLAIM_LOOK_S)
            now = await asyncio.to_thread(self._database.read, claims.read_claim)
            if now != seen and now.owner not in (None, self._server):
                raise self._taken(now.owner)
            seen = now
        if not await asyncio.to_thread(
            self._database.write, lambda c: claims.claim(c, self._server, seen, self._state_keys)
        ):
            raise self._taken("another one, which has just started,")

    @staticmethod
    def _taken(server: str | None) -> ConfigError:
        return ConfigError(
            f"database-url: server {server} trains on this database, and only one server may train on a database: stop "
            "that server, or give this one its own database, or make it a gateway with --backend none"
        )

    async def hold(self) -> None:
        """Renew the claim every HOLD_S seconds. When another server has taken it, log that and return."""
        rounds = Rounds("renewing the claim to this database", CLAIM_HOLD_S)
        while True:
            await asyncio.sleep(CLAIM_HOLD_S)
            try:
                held = await asyncio.to_thread(self._database.write, lambda c: claims.hold(c, self._server))
            except Exception as error:  # logged; the claim holds for some time without it
                rounds.failed(error)
                continue
            rounds.went_well()
            if not held:
                logger.error("another server trains on this database now: this one had not renewed its claim in time")
                return

    def release(self) -> None:
        """Give the claim back. If the database is away, only log that; another server then takes the claim after
        DEAD_AFTER_S seconds."""
        try:
            self._database.write(lambda c: claims.release(c, self._server, "the server has stopped"))
        except DatabaseError as error:
            logger.error("the database was not told that the server has stopped: %s", reason(error))
