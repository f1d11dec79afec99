"""The parts for inference on this machine: the vLLMs of this server with their watchdogs.

Knows where samples go: to the only vLLM, or to the router in front of several. `skyrl_processes` makes the router's
part. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher.first_ready import StartObserver
from skyrl.cli.launcher.metrics import RestartMetrics
from skyrl.cli.launcher.parts import Part
from skyrl.cli.launcher.preflight import Findings, taken_port
from skyrl.cli.launcher.server_parts import ServerParts
from skyrl.inference.engine_kinds import VLLM, Vllm
from skyrl.inference.placement import Placement, ServerPlan
from skyrl.inference.vllm_command import inference_devices
from skyrl.runtime.processes.ports import LOOPBACK, HeldPorts


class InferenceParts:
    """Makes the parts of the vLLMs. All URLs are known before a vLLM is started, and stay: `held` holds the ports while
    this server runs. Raises ConfigError for a port that cannot be held. Without a trainer, all devices are the
    vLLMs'. The only vLLM is called `vllm`; several are `vllm-0`, `vllm-1` and so on. With several base models, the
    base model's name is in between: `vllm-qwen3-4b-0`."""

    def __init__(
        self,
        config: ServerConfig,
        found: Findings,
        key: str,
        placement: Placement,
        first_ready: StartObserver,
        restarts: RestartMetrics,
        held: HeldPorts,
        *,
        has_trainer: bool = True,
    ) -> None:
        inference = config.backend_config.inference
        if inference.ports is None:
            ports = held.take(inference.num_engines, but_not={config.port})
        else:
            ports = inference.ports
            keep_configured(ports, held)
        devices = inference_devices(config, found.devices, has_trainer=has_trainer)
        kind = Vllm(config, key, found.offline, found.vllm_tested)
        self._servers: list[ServerParts] = []
        only = config.role.process(VLLM)
        for number, port in enumerate(ports):
            name = f"{only}-{number}" if config.routed else only
            plan = ServerPlan(name, kind, bool(found.devices), port, tuple(devices[number]))
            shown = "vLLM" if name == VLLM else name
            interval_s = inference.probe_interval_s
            self._servers.append(
                ServerParts(plan, kind, placement, first_ready, restarts, probe_interval_s=interval_s, shown=shown)
            )
        self.replica_urls = tuple(f"http://{LOOPBACK}:{port}" for port in ports)
        self.url = self.replica_urls[0] if not config.routed else router_url(config, held)
        """Where samples go: the only vLLM, or the router."""

    @property
    def watches(self) -> tuple[str, ...]:
        """The names of the parts that others need."""
        return tuple(server.watch_name for server in self._servers)

    def parts(self, needs: tuple[str, ...]) -> list[Part]:
        return [part for server in self._servers for part in server.parts(needs)]


def keep_configured(ports: Sequence[int], held: HeldPorts) -> None:
    """Hold the ports that the operator has chosen for vLLM. Raises ConfigError."""
    for port in ports:
        try:
            held.keep(port)
        except OSError as error:
            raise taken_port(port, error) from error


def router_url(config: ServerConfig, held: HeldPorts) -> str:
    """The URL of this server's router, at a port that is free and now held. Raises ConfigError."""
    host = config.inference_host
    try:
        (port,) = held.take(1, host, but_not={config.port})
    except OSError as error:
        raise ConfigError(f"inference_host: the router cannot listen at {host} ({error.strerror})") from error
    return f"http://{in_url(host)}:{port}"


def in_url(host: str) -> str:
    """A host as a URL has it."""
    return f"[{host}]" if ":" in host else host
