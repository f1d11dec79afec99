"""The Ray cluster of one machine (`--ray-address local`): the command that starts its only node, and who may use it.

Knows Ray's options and variables. Does not start the command: the launcher does, and ends it. `ray start --block` ends
its processes when it is ended; `head_process` ends them when it is killed.

Ray listens at all addresses of the machine, so that its clients need a token: a file in the server's private directory.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import base_models_of

HOST = "127.0.0.2"
"""The node's address. Ray's clients replace 127.0.0.1 by the machine's outer address, where nothing would listen."""
OBJECT_STORE_BYTES = 80 * 2**20
"""About the smallest that Ray takes. Nothing large travels through Ray here."""
PATIENCE_S = 90.0
"""How long the others wait for the cluster: it takes 3 to 7 s to start, and longer on a busy machine."""
LONGEST_TMPDIR = 24
"""Ray's sockets have paths of 66 characters below its directory, and a socket's path has at most 107."""

HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""A killed node is known to be dead after 3 s instead of 15 s."""
PRIORITY = {"RAY_worker_niceness": "0"}
"""By default Ray gives its actors the niceness 15. On a busy core they get a thirtieth of what another process gets.
Here vLLMs and ranks are the actors, and get as much as without Ray."""


@dataclass(frozen=True)
class LocalCluster:
    """The cluster of this machine, at the address HOST:`port`. `directory` is private."""

    config: ServerConfig
    port: int
    directory: Path

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def _token(self) -> Path:
        return self.directory / "ray-token"

    def client_environment(self) -> dict[str, str]:
        """What the processes need that use the cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}

    def write_token(self) -> None:
        descriptor = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))

    def environment(self, devices: Sequence[str]) -> Mapping[str, str]:
        """`devices` are the GPUs that the cluster may give away."""
        return {
            **HEALTH_CHECKS,
            **PRIORITY,
            **self.client_environment(),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_START_HOOK": "skyrl.runtime.ray_cluster.head.without_client_server",
            "PYTHONDONTWRITEBYTECODE": "",
            **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
        }

    def command(self) -> list[str]:
        options: dict[str, object] = {
            "node-ip-address": HOST,
            "port": self.port,
            "min-worker-port": 0,  # any free port; else Ray's range contains the ports of skyrl's own servers
            "max-worker-port": 0,
            "temp-dir": self.directory / "ray",
            "object-store-memory": OBJECT_STORE_BYTES,
            "num-cpus": max(os.cpu_count() or 1, sum(map(wanted_cpus, base_models_of(self.config)))),
            "include-dashboard": "false",
            "include-log-monitor": "false",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        flags = ("--head", "--block", "--no-monitor", "--disable-usage-stats")
        ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, *words]
        return [sys.executable, "-m", "skyrl.runtime.ray_cluster.head_process", *ray_start]


def wanted_cpus(config: ServerConfig) -> int:
    """The CPUs that all parts of one base model ask for. On one machine they share its cores, as without Ray, so
    that Ray is told of as many as they want."""
    inference, placement = config.backend_config.inference, config.backend_config.trainer.placement
    vllm = inference.resources.get("CPU", 0.0) if inference.resources else float(config.threads)
    rank = placement.policy_resources.get("CPU", float(config.threads))  # besides them, as in `rank_places`
    vllms = inference.num_engines if config.modes.manages_inference else 0
    ranks = placement.ranks if config.modes.trains else 0
    return math.ceil(vllms * vllm + ranks * rank)


def without_client_server(parameters: object, head: bool) -> None:
    """Ray's hook at a node's start (RAY_START_HOOK). The server for `ray://` clients would take 90 MB, and port 10001,
    which another cluster on this machine may have."""
    parameters.ray_client_server_port = None  # pyright: ignore[reportAttributeAccessIssue]
