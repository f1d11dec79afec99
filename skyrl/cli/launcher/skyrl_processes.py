"""The parts that are skyrl's own: the API processes, the engine, the router, the sidecars, the port, the claim to the
database, and the watch of the disk.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher.first_ready import FirstReady
from skyrl.cli.launcher.log_rotation import rotate_logs
from skyrl.cli.launcher.parts import Part
from skyrl.cli.launcher.training_claim import TrainingClaim
from skyrl.inference.vllm_client import Probe, VllmClient
from skyrl.inference.vllm_command import NO_PROGRESS_BARS, OFFLINE
from skyrl.inference.watchdog import Watchdog
from skyrl.runtime.metrics.files import MetricsDirectory, MetricsWriter
from skyrl.runtime.metrics.processes import LauncherMetrics
from skyrl.runtime.metrics.restarts import RestartMetrics
from skyrl.runtime.metrics.storage import show_free_space
from skyrl.runtime.processes.running_file import running_now
from skyrl.runtime.processes.runtime import RUNTIME_ENV, SIDECAR_ENV, SLOT_ENV, SOCKETS_ENV, Runtime
from skyrl.runtime.processes.startup import TAIL_LINES, Cause, cause_of_own, cause_of_vllm
from skyrl.runtime.processes.supervision import SupervisedProcess
from skyrl.runtime.ray_cluster.head import LocalCluster
from skyrl.storage.checkpoint_store.space import watch_disk
from skyrl.storage.db.database import Database

logger = logging.getLogger(__name__)

API_GRACE_S = 15.0
ENGINE_GRACE_S = 20.0
ROUTER_GRACE_S = 3.0
PLACEMENT_GRACE_S = 15.0
RAY_GRACE_S = 10.0
SIDECAR_GRACE_S = 3.0
ROUTER_TIMEOUT_S = 10.0
"""A router that answers nothing for this long is killed and started again. It never computes for long."""
ROUTER_PROBE_S = 1.0
CLAIM, CLAIM_WATCH, ENGINE, PORT, DISK, METRICS = "claim", "claim watch", "engine", "port", "disk", "metrics"
LOGS, RAY, PLACEMENT = "logs", "ray", "placement"
ROUTER, ROUTER_WATCH = "router", "router watch"
SIDECAR = "sidecar"
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
    writer = MetricsWriter(MetricsDirectory(directory), "launcher", metrics.registry, owns=True)
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
    """Makes the parts of the engine, of the router, of the sidecars and of the API processes."""

    def __init__(
        self,
        runtime: Runtime,
        logs: Path,
        first_ready: FirstReady,
        restarts: RestartMetrics,
        *,
        offline: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is what these processes need besides what all servers' processes have."""
        self._runtime = runtime
        self._restarts = restarts
        self._logs = logs
        self._first_ready = first_ready
        self._offline = OFFLINE if offline else {}
        self._environment = {
            RUNTIME_ENV: str(runtime.write()),
            "OMP_NUM_THREADS": str(runtime.config.threads),
            "PYTHONDONTWRITEBYTECODE": "",  # without byte code the import of torch and transformers takes twice as long
            **NO_PROGRESS_BARS,
            **self._offline,
            **(environment or {}),
        }
        self._placement: SupervisedProcess | None = None

    def engine(self, needs: tuple[str, ...]) -> Part:
        return self._part(self._process(ENGINE, "skyrl.training.engine.main"), needs, ENGINE_GRACE_S)

    def placement(self, needs: tuple[str, ...]) -> Part:
        """The process that runs the vLLMs on a Ray cluster."""
        self._placement = self._process(PLACEMENT, "skyrl.cli.ray_placement.main")
        return self._part(self._placement, needs, PLACEMENT_GRACE_S)

    def ray_head(self, cluster: LocalCluster, devices: Sequence[str], needs: tuple[str, ...]) -> Part:
        """The Ray cluster of this machine. When it ends, its vLLMs end, and their placement process is started
        again."""

        def ended(code: int) -> None:
            logger.error("Ray has ended with %d, and with it all that ran on it", code)
            if self._placement is not None and self._placement.pid is not None:
                self._placement.kill(self._placement.pid)
            cause = cause_of_vllm(code, process.log_tail(TAIL_LINES))
            sentence = None if cause is None else Cause(f"Ray cannot start: {cause.sentence}", cause.final)
            self._first_ready.ended(RAY, code, sentence)

        log, environment = self._logs / f"{RAY}.log", {**cluster.environment(devices), **self._offline}
        process = SupervisedProcess(RAY, cluster.command(), environment, log, on_exit=ended)
        self._first_ready.watch(RAY, process)
        return self._part(process, needs, RAY_GRACE_S)

    def router(self, needs: tuple[str, ...]) -> list[Part]:
        """The router in front of several vLLMs, and its watchdog."""
        process = self._process(ROUTER, "skyrl.router.managed")
        watch = Part(ROUTER_WATCH, (ROUTER,), supervise=lambda: self._watch_router(process), duty="watching the router")
        return [self._part(process, needs, ROUTER_GRACE_S), watch]

    def sidecars(self, needs: tuple[str, ...]) -> list[Part]:
        """The sidecars of the vLLMs, through which the engine changes their weights."""
        numbers = range(len(self._runtime.sidecar_urls))
        named = {number: {SIDECAR_ENV: str(number)} for number in numbers}
        made = (
            self._process(f"{SIDECAR}-{number}", "skyrl.inference.sidecar.managed", named[number]) for number in numbers
        )
        return [self._part(process, needs, SIDECAR_GRACE_S) for process in made]

    def api(self, slot: int, sockets: Sequence[socket.socket], needs: tuple[str, ...]) -> Part:
        """The API process of this slot. It inherits the sockets and accepts connections from them."""
        descriptors = [listener.fileno() for listener in sockets]
        own_environment = {SLOT_ENV: str(slot), SOCKETS_ENV: ",".join(map(str, descriptors))}
        process = self._process(api_name(slot), "skyrl.server.api.server", own_environment, descriptors)
        return self._part(process, needs, API_GRACE_S)

    def _process(
        self, name: str, module: str, own_environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> SupervisedProcess:
        def ended(code: int) -> None:
            self._restore_runtime_file()
            cause = cause_of_own(code, process.log_tail(TAIL_LINES))
            if name == ENGINE:
                self._log_what_ran()
                self._restarts.ended("engine", "died" if cause is None else "config")
            self._first_ready.ended(name, code, cause)

        environment = self._environment | dict(own_environment or {})
        log = self._logs / f"{name}.log"
        process = SupervisedProcess(name, _python(module), environment, log, on_exit=ended, pass_fds=pass_fds)
        self._first_ready.watch(name, process)
        return process

    def _part(self, process: SupervisedProcess, needs: tuple[str, ...], grace_s: float) -> Part:
        return Part(
            process.name,
            needs,
            supervise=process.run,
            duty=f"supervising {process.name}",
            stop=lambda: process.stop(grace_s),
            grace_s=grace_s,
        )

    async def _watch_router(self, router: SupervisedProcess) -> None:
        runtime = self._runtime
        assert runtime.inference_url is not None
        client = VllmClient(runtime.inference_url, runtime.inference_api_key or "")
        timeouts: dict[Probe, float] = {"/statusz": ROUTER_TIMEOUT_S}
        watchdog = Watchdog(client, router, timeouts, interval_s=ROUTER_PROBE_S, name="the router")
        try:
            await watchdog.run()
        finally:
            await client.close()

    def _log_what_ran(self) -> None:
        """Name the commands that ran when the engine ended, so that they are found in the log of each process."""
        if running := running_now(self._runtime.config.running_file):
            logger.warning("the engine has ended while it ran %s", ", ".join(running))

    def _restore_runtime_file(self) -> None:
        """Write the file again that a process reads when it starts: somebody may have deleted it."""
        try:
            self._runtime.restore()
        except OSError as error:
            logger.error("what a process needs to start again cannot be written: %s", error)


def api_name(slot: int) -> str:
    return "api" if slot == 0 else f"api-{slot}"


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]
