"""`skyrl serve`: decides which parts a server has, starts them, and stops them when the server ends.

The API processes, the engine and vLLM are siblings, so that each survives the others. `with_threads` gives trainer and
vLLM a number of CPU threads where the configuration does not say. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.cli.launcher.auto_slots import with_slots
from skyrl.cli.launcher.base_model_parts import BaseModelParts
from skyrl.cli.launcher.first_ready import BaseModelsWatch, FirstReady
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.cli.launcher.parts import Part, Parts, ServerEnded
from skyrl.cli.launcher.preflight import Findings, check_each
from skyrl.cli.launcher.skyrl_processes import (
    CLAIM_WATCH,
    PORT,
    RAY,
    OwnProcesses,
    claim_parts,
    disk_part,
    log_part,
    metrics_part,
    port_part,
    server_id,
)
from skyrl.cli.launcher.state_dir import LONGEST_TMPDIR, lock_state_dir, private_directory
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.vllm_command import cuda_devices
from skyrl.runtime.processes.ports import HeldPorts, listen
from skyrl.runtime.processes.runtime import Runtime, set_up_process
from skyrl.runtime.processes.systemd import Systemd
from skyrl.runtime.ray_cluster import head
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate
from skyrl.storage.db.store_ownership import claim_store

MOST_THREADS = 16
"""More threads make steps of small models slower: each product waits for the last thread."""


def with_threads(config: ServerConfig) -> ServerConfig:
    """The configuration with as many `threads` as this process has cores, if it does not name a number itself.

    A tenant who samples and trains in turns has either vLLM or the trainer idle, so both get all cores. Replicas and
    base models compute at the same time, so they divide the cores. With Ray each process asks the cluster for as many
    CPUs as `threads`, and on a GPU threads do nothing: there the default stays."""
    if "threads" in config.model_fields_set or config.ray is not None or cuda_devices():
        return config
    together = max(config.backend_config.inference.num_engines, len(config.base_models))
    threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // together))
    return config.model_copy(update={"threads": threads})


logger = logging.getLogger(__name__)


class Launcher:
    """Runs one server. `findings` are the results of the checks before the start, for each of its base models."""

    def __init__(self, config: ServerConfig, findings: Sequence[Findings], systemd: Systemd) -> None:
        self._config = config
        self._base_models = base_models_of(config)
        self._trains = any(part.modes.trains for part in self._base_models)
        self._ray = next((part.ray for part in self._base_models if part.ray is not None), None)
        self._findings = findings
        self._systemd = systemd
        self._logs = config.state_dir / "logs"
        self._parts = Parts()
        self._held = HeldPorts()
        self._names: dict[int, list[str]] = {}
        """The names of the parts of each base model, by number."""

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
                if self._trains:
                    await asyncio.to_thread(claim_store, config, database, name)
                    state_keys = [part.role.state_keys[0] for part in self._base_models]
                    await self._add(*claim_parts(database, name, state_keys))
                if stop.is_set():  # taking the claim may have taken a while: another server may have had it
                    return
                longest = LONGEST_TMPDIR if self._ray is None else head.LONGEST_TMPDIR
                directory = resources.enter_context(private_directory(config.state_dir, longest))
                await self._serve(stop, directory, name, sockets, database)
            finally:
                self._systemd.stopping(f"stopping; this takes at most {self._parts.grace_s:.0f} s")
                await self._parts.stop()

    async def _serve(
        self, stop: asyncio.Event, directory: Path, name: str, sockets: list[socket.socket], database: Database
    ) -> None:
        first_ready = FirstReady(self._config, self._base_models, self._logs, self._systemd)
        await self._start_parts(directory, name, sockets, database, first_ready)
        try:
            await self._until_over(stop, first_ready)
        finally:
            logger.info("stopping; this takes at most %.0f s", self._parts.grace_s)

    async def _start_parts(
        self, directory: Path, name: str, sockets: list[socket.socket], database: Database, first_ready: FirstReady
    ) -> None:
        """Start the Ray cluster, the parts of each base model, the port and the API processes. They stop in reverse:
        the API processes first, so that they can end the samples in flight, then the port, and the vLLMs last."""
        config, found = self._config, self._findings[0]
        metrics = LauncherMetrics.new([part.role.labels for part in self._base_models])
        placement = LocalPlacement(self._logs, directory)
        made = [
            BaseModelParts(part, of_part, first_ready.observer(part), restarts, self._held, placement)
            for part, of_part, restarts in zip(self._base_models, self._findings, metrics.of_models, strict=True)
        ]
        cluster = None
        if self._ray == "local":
            (port,) = self._held.take(1, head.HOST, but_not={config.port})
            cluster = head.LocalCluster(config, port, directory)
        address = found.ray_address if cluster is None else cluster.address
        patience_s = 0.0 if cluster is None else head.PATIENCE_S
        runtimes = tuple(each.runtime(directory, name, address, patience_s) for each in made)
        server = Runtime.of_several(config, runtimes) if config.base_models else runtimes[0]
        await self._add(metrics_part(metrics, server.metrics_directory, config.state_dir))
        environment = {} if cluster is None else cluster.client_environment()
        offline = all(of_part.offline for of_part in self._findings)
        own = OwnProcesses(server, self._logs, first_ready, offline=offline, environment=environment)
        needs = (CLAIM_WATCH,) if self._trains else ()
        if cluster is not None:
            cluster.write_token()

            def place_again() -> None:
                for each in made:
                    each.place_again()

            await self._add(own.ray_head(cluster, found.devices, needs, place_again))
            needs = (*needs, RAY)
        lasts: list[str] = []
        for number, (each, runtime) in enumerate(zip(made, runtimes, strict=True)):
            parts = each.parts(own, runtime, database, needs)
            await self._add(*parts)
            self._names[number] = [part.name for part in parts]
            lasts += self._names[number][-1:]
        await self._add(port_part(sockets, tuple(lasts)))
        await self._add(*(own.api(slot, sockets, (PORT,)) for slot in range(config.api_processes)))
        await self._add(disk_part(config.state_dir), log_part(self._logs, config))
        if config.base_models:
            watch = BaseModelsWatch(first_ready, self._parts, self._names, database)
            await self._add(*watch.parts())

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
                    logger.error("waiting until the server is ready has failed", exc_info=failure)
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


async def _main(config: ServerConfig, findings: Sequence[Findings], systemd: Systemd) -> None:
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
    config, about_slots = with_slots(config)
    if about_slots:
        logger.info(about_slots)
    base_models = base_models_of(config)
    findings = check_each(base_models)
    if config.modes.trains and (undecided := config.losses.undecided) is not None:
        logger.info(undecided)
    with lock_state_dir(config.state_dir):
        logger.info(
            "serving %s on %s:%d, state in %s",
            ", ".join(part.served_names[0] for part in base_models),
            config.host,
            config.port,
            config.state_dir,
        )
        asyncio.run(_main(config, findings, systemd))
        logger.info("stopped")
