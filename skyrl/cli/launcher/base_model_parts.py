"""The parts of one base model: its vLLMs (or the process that places them on Ray), their sidecars, the router, and the
engine; without an engine, the watch that finds its vLLMs ready.

Names them after the base model where the server has several. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher.first_ready import StartObserver
from skyrl.cli.launcher.inference_parts import InferenceParts, router_url
from skyrl.cli.launcher.metrics import RestartMetrics
from skyrl.cli.launcher.parts import Part
from skyrl.cli.launcher.preflight import Findings
from skyrl.cli.launcher.skyrl_processes import (
    ENGINE,
    PLACEMENT,
    PLACEMENT_GRACE_S,
    ROUTER,
    ROUTER_GRACE_S,
    SIDECAR,
    SIDECAR_GRACE_S,
    OwnProcesses,
)
from skyrl.inference.placement import DEVICES_ENV, LocalPlacement
from skyrl.inference.vllm_client import Probe, VllmClient
from skyrl.inference.watchdog import Watchdog
from skyrl.runtime.processes.ports import LOOPBACK, HeldPorts
from skyrl.runtime.processes.runtime import BASE_MODEL_ENV, SIDECAR_ENV, Runtime
from skyrl.runtime.processes.startup import Cause, running_now
from skyrl.runtime.processes.supervision import SupervisedProcess
from skyrl.storage.db.database import Database

logger = logging.getLogger(__name__)

ROUTER_TIMEOUT_S = 10.0
"""A router that answers nothing for this long is killed and started again. It never computes for long."""
ROUTER_PROBE_S = 1.0


@dataclass(frozen=True)
class Addresses:
    """Where one base model is sampled from, as in `Runtime`."""

    url: str | None
    key: str | None
    replicas: tuple[str, ...] = ()
    sidecars: tuple[str, ...] = ()


class BaseModelParts:
    """Makes the parts of the base model of `config`. Its addresses are known at once; the ports are in `held`. Raises
    ConfigError for a port that cannot be held."""

    def __init__(
        self,
        config: ServerConfig,
        found: Findings,
        observer: StartObserver,
        restarts: RestartMetrics,
        held: HeldPorts,
        placement: LocalPlacement,
    ) -> None:
        self._config = config
        self._found = found
        self._observer = observer
        self._restarts = restarts
        self._inference: InferenceParts | None = None
        self._placing: SupervisedProcess | None = None
        key = config.external_inference_api_key
        if config.modes.own_inference:
            key = config.inference_api_key or secrets.token_urlsafe(32)
        self.addresses = Addresses(None, key)
        if not config.modes.manages_inference:
            return
        assert key is not None
        if config.ray is not None:
            self.addresses = Addresses(router_url(config, held), key)
            return
        trains = config.modes.trains
        self._inference = InferenceParts(config, found, key, placement, observer, restarts, held, has_trainer=trains)
        replicas, sidecars = self._inference.replica_urls, ()
        if config.full_finetuning:
            ports = held.take(len(replicas), but_not={config.port})
            sidecars = tuple(f"http://{LOOPBACK}:{port}" for port in ports)
        self.addresses = Addresses(self._inference.url, key, replicas, sidecars)

    def runtime(self, directory: Path, server_id: str, ray_address: str | None, ray_patience_s: float) -> Runtime:
        """The runtime of this base model's processes."""
        at = self.addresses
        return Runtime(
            self._config,
            directory,
            at.url,
            at.key,
            server_id,
            at.replicas,
            ray_address=ray_address,
            ray_patience_s=ray_patience_s,
            cuda=self._found.cuda,
            sidecar_urls=at.sidecars,
        )

    def parts(self, own: OwnProcesses, runtime: Runtime, database: Database, needs: tuple[str, ...]) -> list[Part]:
        """All parts, each after those that it needs; the last one is that for which the others are there. Each needs
        `needs`."""
        return list(self._parts(own, runtime, database, needs))

    def _parts(self, own: OwnProcesses, runtime: Runtime, database: Database, needs: tuple[str, ...]) -> Iterator[Part]:
        if self._config.modes.manages_inference:
            if self._inference is None:
                self._placing = self._process(own, PLACEMENT, "skyrl.cli.ray_placement.main")
                yield own.part(self._placing, needs, PLACEMENT_GRACE_S)
                needs = (*needs, self._placing.name)
            else:
                yield from self._inference.parts(needs)
                needs = (*needs, *self._inference.watches)
                for number in range(len(runtime.sidecar_urls)):
                    sidecar = self._process(
                        own, SIDECAR, "skyrl.inference.sidecar.main", {SIDECAR_ENV: str(number)}, f"-{number}"
                    )
                    yield own.part(sidecar, needs, SIDECAR_GRACE_S)
            if self._config.routed:
                router = self._process(own, ROUTER, "skyrl.router.main")
                yield own.part(router, needs, ROUTER_GRACE_S)
                watch = f"{router.name} watch"
                yield Part(
                    watch, (router.name,), supervise=lambda: _watch_router(runtime, router), duty="watching the router"
                )
                needs = (*needs, watch)
        if self._config.modes.trains:
            engine = self._process(own, ENGINE, "skyrl.engine.main")
            yield own.part(engine, needs, self._config.stop_grace_s)
        elif self._config.modes.manages_inference:
            from skyrl.cli.launcher.only_sampled import only_sampled_part  # 7 MB that other servers need not have

            yield only_sampled_part(runtime, database, needs)

    def place_again(self) -> None:
        """The Ray cluster has ended, and with it the vLLMs: the process that places them begins anew."""
        if self._placing is not None and self._placing.pid is not None:
            self._placing.kill(self._placing.pid)

    def _process(
        self,
        own: OwnProcesses,
        kind: str,
        module: str,
        more: dict[str, str] | None = None,
        suffix: str = "",
    ) -> SupervisedProcess:
        role, devices = self._config.role, self._found.devices
        environment = dict(more or {})
        if role.name:
            environment[BASE_MODEL_ENV] = str(role.number)
        if self._config.devices is not None and devices:
            environment[DEVICES_ENV] = ",".join(devices)
        on_end = self._engine_ended if kind == ENGINE else lambda _: None
        name = role.process(kind) + suffix
        return own.process(name, module, self._observer, environment, offline=self._found.offline, on_end=on_end)

    def _engine_ended(self, cause: Cause | None) -> None:
        """Name the commands that ran when the engine ended, so that they are found in the log of each process."""
        if running := running_now(self._config.running_file):
            logger.warning("the engine has ended while it ran %s", ", ".join(running))
        self._restarts.ended("engine", "died" if cause is None else "config")


async def _watch_router(runtime: Runtime, router: SupervisedProcess) -> None:
    assert runtime.inference_url is not None
    client = VllmClient(runtime.inference_url, runtime.inference_api_key or "")
    timeouts: dict[Probe, float] = {"/statusz": ROUTER_TIMEOUT_S}
    name = "the router" if router.name == ROUTER else router.name
    watchdog = Watchdog(client, router, timeouts, interval_s=ROUTER_PROBE_S, name=name)
    try:
        await watchdog.run()
    finally:
        await client.close()
