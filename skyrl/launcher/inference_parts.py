"""The parts for inference on this machine: the vLLMs of this server with their watchdogs.

Knows where samples go: to the only vLLM, or to the router in front of several. `own_parts` makes the router's part.
Imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Collection

from skyrl.config.server import ServerConfig
from skyrl.inference.engine_kinds import VLLM, Vllm
from skyrl.inference.placement import LOOPBACK, Placement, ServerPlan, free_port
from skyrl.inference.vllm_command import inference_devices
from skyrl.launcher.first_ready import StartObserver
from skyrl.launcher.parts import Part
from skyrl.launcher.preflight import Findings
from skyrl.launcher.server_parts import ServerParts
from skyrl.metrics.restarts import RestartMetrics


class InferenceParts:
    """Makes the parts of the vLLMs. All URLs are known before a vLLM is started. Without a trainer, all devices are the
    vLLMs'. The only vLLM is called `vllm`; several are `vllm-0`, `vllm-1` and so on."""

    def __init__(
        self,
        config: ServerConfig,
        found: Findings,
        key: str,
        placement: Placement,
        first_ready: StartObserver,
        restarts: RestartMetrics,
        *,
        has_trainer: bool = True,
    ) -> None:
        inference = config.backend_config.inference
        ports = inference.ports or distinct_ports(inference.num_engines)
        devices = inference_devices(config, found.devices, has_trainer=has_trainer)
        kind = Vllm(config, key, found.offline, found.vllm_tested)
        self._servers: list[ServerParts] = []
        for number, port in enumerate(ports):
            name = f"{VLLM}-{number}" if config.routed else VLLM
            plan = ServerPlan(name, kind, bool(found.devices), port, tuple(devices[number]))
            shown = "vLLM" if name == VLLM else name
            interval_s = inference.probe_interval_s
            self._servers.append(
                ServerParts(plan, kind, placement, first_ready, restarts, probe_interval_s=interval_s, shown=shown)
            )
        self.replica_urls = tuple(f"http://{LOOPBACK}:{port}" for port in ports)
        self.url = self.replica_urls[0] if not config.routed else router_url(config, ports)
        """Where samples go: the only vLLM, or the router."""
        self.ports = frozenset({*ports, int(self.url.rpartition(":")[2])})

    @property
    def watches(self) -> tuple[str, ...]:
        """The names of the parts that others need."""
        return tuple(server.watch_name for server in self._servers)

    def parts(self, needs: tuple[str, ...]) -> list[Part]:
        return [part for server in self._servers for part in server.parts(needs)]


def router_url(config: ServerConfig, taken: Collection[int]) -> str:
    """The URL of this server's router, at a port that is free and not in `taken`. Raises OSError."""
    return f"http://{in_url(config.inference_host)}:{distinct_ports(1, {*taken, config.port})[0]}"


def in_url(host: str) -> str:
    """A host as a URL has it."""
    return f"[{host}]" if ":" in host else host


def distinct_ports(count: int, taken: Collection[int] = (), host: str = LOOPBACK) -> list[int]:
    """Free ports, none of them in `taken`. Raises OSError."""
    ports: list[int] = []
    while len(ports) < count:
        if (port := free_port(host)) not in ports and port not in taken:
            ports.append(port)
    return ports
