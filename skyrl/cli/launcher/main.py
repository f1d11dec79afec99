"""`skyrl serve`: decides which parts a server has, starts them, and stops them when the server ends.

The API processes, the engine and vLLM are siblings, so that each survives the others. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from contextlib import ExitStack, closing
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.cli.launcher.first_ready import FirstReady
from skyrl.cli.launcher.inference_parts import InferenceParts, router_url
from skyrl.cli.launcher.parts import Part, Parts, ServerEnded
from skyrl.cli.launcher.preflight import Findings, check
from skyrl.cli.launcher.skyrl_processes import (
    CLAIM_WATCH,
    ENGINE,
    PLACEMENT,
    PORT,
    RAY,
    ROUTER_WATCH,
    OwnProcesses,
    claim_parts,
    disk_part,
    log_part,
    metrics_part,
    port_part,
)
from skyrl.cli.launcher.state_dir import LONGEST_TMPDIR, lock_state_dir, private_directory
from skyrl.cli.launcher.training_claim import server_id
from skyrl.inference.placement import LocalPlacement
from skyrl.runtime.metrics.processes import LauncherMetrics
from skyrl.runtime.processes.listening import listen
from skyrl.runtime.processes.ports import LOOPBACK, HeldPorts
from skyrl.runtime.processes.runtime import Runtime, set_up_process
from skyrl.runtime.processes.systemd import Systemd
from skyrl.runtime.ray_cluster import head
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate
from skyrl.storage.db.store_ownership import claim_store

logger = logging.getLogger(__name__)


class Launcher:
    """Runs one server. `findings` are the results of the checks before the start."""

    def __init__(self, config: ServerConfig, findings: Findings, systemd: Systemd) -> None:
        self._config = config
        self._findings = findings
        self._systemd = systemd
        self._logs = config.state_dir / "logs"
        self._parts = Parts()
        self._held = HeldPorts()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Returns when all processes of this server have ended.

        Raises ConfigError (port, database, options of vLLM), StartupError when the server can never become ready, and
        ServerEnded. Before an error is raised, all processes have ended, too.
        """
        config = self._config
        with ExitStack() as resources:
            resources.enter_context(self._held)
            sockets = [resources.enter_context(listener) for listener in listen(config.host, config.port)]
            database = resources.enter_context(closing(Database(config.database)))
            await asyncio.to_thread(migrate, database)
            name = server_id(config.state_dir)
            try:
                if config.modes.trains:
                    await asyncio.to_thread(claim_store, config, database, name)
                    state_keys = [part.role.state_keys[0] for part in base_models_of(config)]
                    await self._add(*claim_parts(database, name, state_keys))
                if stop.is_set():  # taking the claim may have taken a while: another server may have had it
                    return
                longest = LONGEST_TMPDIR if config.ray is None else head.LONGEST_TMPDIR
                directory = resources.enter_context(private_directory(config.state_dir, longest))
                await self._serve(stop, directory, name, sockets)
            finally:
                self._systemd.stopping(f"stopping; this takes at most {self._parts.grace_s:.0f} s")
                await self._parts.stop()

    async def _serve(self, stop: asyncio.Event, directory: Path, name: str, sockets: list[socket.socket]) -> None:
        first_ready = FirstReady(self._config, self._logs, self._systemd)
        await self._start_parts(directory, name, sockets, first_ready)
        try:
            await self._until_over(stop, first_ready)
        finally:
            logger.info("stopping; this takes at most %.0f s", self._parts.grace_s)

    async def _start_parts(
        self, directory: Path, name: str, sockets: list[socket.socket], first_ready: FirstReady
    ) -> None:
        """Start the vLLMs with their sidecars (or the Ray cluster and the placement process of
        vLLMs), the router, the engine, the port and the API
        processes. They stop in reverse: the API processes first, so that they can end the samples in flight, then the
        port, the engine, the router, and the vLLMs last."""
        config, found = self._config, self._findings
        metrics = LauncherMetrics.new()
        inference, cluster = None, None
        key, url, replicas, sidecars = config.external_inference_api_key, None, (), ()
        if config.modes.own_inference:
            key = config.inference_api_key or secrets.token_urlsafe(32)
        if config.modes.manages_inference:
            assert key is not None
            if config.ray is not None:
                url = router_url(config, self._held)
            else:
                placement = LocalPlacement(self._logs, directory)
                inference = InferenceParts(config, found, key, placement, first_ready, metrics.restarts, self._held)
                url, replicas = inference.url, inference.replica_urls
                if config.full_finetuning:
                    ports = self._held.take(len(replicas), but_not={config.port})
                    sidecars = tuple(f"http://{LOOPBACK}:{port}" for port in ports)
        if config.ray == "local":
            (port,) = self._held.take(1, head.HOST, but_not={config.port})
            cluster = head.LocalCluster(config, port, directory)
        runtime = Runtime(
            config,
            directory,
            url,
            key,
            name,
            replicas,
            ray_address=found.ray_address if cluster is None else cluster.address,
            ray_patience_s=0.0 if cluster is None else head.PATIENCE_S,
            cuda=found.cuda,
            sidecar_urls=sidecars,
        )
        await self._add(metrics_part(metrics, runtime.metrics_directory, config.state_dir))
        environment = {} if cluster is None else cluster.client_environment()
        own = OwnProcesses(
            runtime, self._logs, first_ready, metrics.restarts, offline=found.offline, environment=environment
        )
        needs = (CLAIM_WATCH,) if config.modes.trains else ()
        if cluster is not None:
            cluster.write_token()
            await self._add(own.ray_head(cluster, found.devices, needs))
            needs = (*needs, RAY)
        if config.modes.manages_inference:
            if inference is None:
                await self._add(own.placement(needs))
                needs = (*needs, PLACEMENT)
            else:
                await self._add(*inference.parts(needs))
                needs = (*needs, *inference.watches)
                await self._add(*own.sidecars(needs))
            if config.routed:
                await self._add(*own.router(needs))
                needs = (*needs, ROUTER_WATCH)
        if config.modes.trains:
            await self._add(own.engine(needs))
            needs = (ENGINE,)
        await self._add(port_part(sockets, needs))
        await self._add(*(own.api(slot, sockets, (PORT,)) for slot in range(config.api_processes)))
        await self._add(disk_part(config.state_dir), log_part(self._logs, config))

    async def _add(self, *parts: Part) -> None:
        for part in parts:
            await self._parts.add(part)

    async def _until_over(self, stop: asyncio.Event, first_ready: FirstReady) -> None:
        """Return when `stop` is set. Raises StartupError, and ServerEnded when a part ends by itself."""
        stopping = asyncio.create_task(stop.wait())
        ends = [stopping, *map(asyncio.create_task, (first_ready.until_hopeless(), self._parts.until_one_ends()))]
        announcing = asyncio.create_task(first_ready.announce())
        try:
            done, _ = await asyncio.wait({*ends, announcing}, return_when=asyncio.FIRST_COMPLETED)
            if done == {announcing}:
                if (failure := announcing.exception()) is not None:
                    raise ServerEnded(f"waiting until the server is ready has failed: {failure}") from failure
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:  # if several have ended, the first in this order counts
                if end.done():
                    await end
                    return
        finally:
            for task in (*ends, announcing):
                task.cancel()
            await asyncio.gather(*ends, announcing, return_exceptions=True)


async def _main(config: ServerConfig, findings: Findings, systemd: Systemd) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            logger.warning("already stopping: processes that do not end in time are killed")
        stop.set()

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(name, on_signal)
    async with systemd.watched():
        await Launcher(config, findings, systemd).run(stop)


def serve(config: ServerConfig) -> None:
    """Run a server in the foreground until SIGTERM, SIGINT or SIGHUP.

    Raises ConfigError (base model, port, state directory, options of vLLM), SchemaError (a database from a newer
    version), DatabaseAway, StartupError (a process can never start) and ServerEnded.
    """
    set_up_process(config.log_level, config.log_format)
    systemd = Systemd.take_from(os.environ)
    systemd.status("checking the configuration")
    findings = check(config)
    if config.modes.trains and (undecided := config.losses.undecided) is not None:
        logger.info(undecided)
    with lock_state_dir(config.state_dir):
        logger.info(
            "serving %s on %s:%d, state in %s",
            config.served_names[0],
            config.host,
            config.port,
            config.state_dir,
        )
        asyncio.run(_main(config, findings, systemd))
        logger.info("stopped")
