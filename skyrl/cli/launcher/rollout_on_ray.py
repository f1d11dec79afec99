"""The processes of a plane whose vLLMs and sidecars run on a Ray cluster: the cluster of this machine, if it is started
here, and the placement process (`skyrl.cli.ray_placement.rollout_plane`), which tells the router of them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher.preflight import Findings
from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE
from skyrl.inference.vllm_command import NO_PROGRESS_BARS, OFFLINE
from skyrl.runtime.processes.ports import HeldPorts
from skyrl.runtime.processes.runtime import PLACED, RUNTIME_ENV, Runtime
from skyrl.runtime.ray_cluster import head

logger = logging.getLogger(__name__)

LOOK_S = 1.0
PLACEMENT_GRACE_S, RAY_GRACE_S = 15.0, 10.0


def check_keys(ray: str) -> None:
    """Raises ConfigError where sidecars would listen on a network without keys."""
    missing = [name for name in (ROUTER_KEY_VARIABLE, ADMIN_KEY_VARIABLE) if not os.environ.get(name)]
    if ray != "local" and missing:
        raise ConfigError(
            f"ray_address: the engines listen on the network between the nodes of the Ray cluster ({ray}), and nobody "
            f"may reach them without a key: set {' and '.join(missing)}"
        )


@dataclass(frozen=True)
class Command:
    """A process of the plane. `env` is added to this process's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacedProcesses:
    """`ray` is None where the cluster runs already."""

    placement: Command
    ray: Command | None


def placed_processes(
    config: ServerConfig,
    ray: str,
    found: Findings,
    directory: Path,
    router_url: str,
    vllm_key: str,
    held: HeldPorts,
) -> PlacedProcesses:
    """The commands of these processes; writes the files that they read into the private `directory`. A cluster of this
    machine gets a port from `held`."""
    cluster = None
    if ray == "local":
        (port,) = held.take(1, head.HOST, but_not={int(router_url.rpartition(":")[2])})
        cluster = head.LocalCluster(config, port, directory)
        cluster.write_token()
    runtime = Runtime(
        config,
        directory,
        router_url,
        vllm_key,
        server_id=f"rollout-{directory.name}",
        ray_address=found.ray_address if cluster is None else cluster.address,
        ray_patience_s=0.0 if cluster is None else head.PATIENCE_S,
        cuda=found.cuda,
    )
    offline = OFFLINE if found.offline else {}
    env = {RUNTIME_ENV: str(runtime.write()), "PYTHONDONTWRITEBYTECODE": "", **NO_PROGRESS_BARS, **offline}
    if cluster is not None:
        env |= cluster.client_environment()
    placement = Command((sys.executable, "-m", "skyrl.cli.ray_placement.rollout_plane"), env)
    if cluster is None:
        return PlacedProcesses(placement, None)
    return PlacedProcesses(
        placement, Command(tuple(cluster.command()), {**cluster.environment(found.devices), **offline})
    )


async def tell_changes(directory: Path) -> None:
    """Log what the placement process says of each vLLM whenever it changes, until cancelled."""
    told: dict[str, str] = {}
    while True:
        try:
            placed = json.loads(await asyncio.to_thread((directory / PLACED).read_text))
        except (OSError, ValueError):  # the placement process is starting
            placed = {}
        for name, what in placed.items():
            if told.get(name) != what:
                logger.info("%s %s", name, what)
        told |= placed
        await asyncio.sleep(LOOK_S)
