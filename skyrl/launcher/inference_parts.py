"""The parts for inference: the vLLMs of this server, and for each a watchdog that kills it when it hangs.

Knows where samples go: to the only vLLM, or to the router in front of several. `own_parts` makes the router's part.
Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from skyrl.config.server import ServerConfig
from skyrl.inference.placement import Placement, ServerHandle, ServerSpec, free_port
from skyrl.inference.vllm_client import Probe, VllmClient
from skyrl.inference.vllm_command import LOGGING_CONFIG, inference_devices, options_named, vllm_spec
from skyrl.inference.watchdog import Watchdog
from skyrl.launcher.first_ready import StartObserver
from skyrl.launcher.parts import Part
from skyrl.launcher.preflight import Findings
from skyrl.metrics.restarts import RestartMetrics
from skyrl.processes.log_format import vllm_logging
from skyrl.processes.startup import TAIL_LINES, Cause, cause_of_vllm

INFERENCE_GRACE_S = 5.0
VLLM = "vllm"
"""The name of the part of the only vLLM. Several are `vllm-0`, `vllm-1` and so on."""


class InferenceParts:
    """Makes the parts of the vLLMs. All URLs are known before a vLLM is started. Without a trainer, all devices are the
    vLLMs'."""

    def __init__(
        self,
        config: ServerConfig,
        found: Findings,
        key: str,
        directory: Path,
        placement: Placement,
        first_ready: StartObserver,
        restarts: RestartMetrics,
        *,
        has_trainer: bool = True,
    ) -> None:
        inference = config.backend_config.inference
        ports = inference.ports or distinct_ports(inference.num_engines)
        devices = inference_devices(config, found.devices, has_trainer=has_trainer)
        self._replicas: list[_VllmPart] = []
        for number, port in enumerate(ports):
            name = f"{VLLM}-{number}" if config.routed else VLLM
            spec = vllm_spec(
                config,
                port,
                key,
                cuda=bool(found.devices),
                directory=directory,
                offline=found.offline,
                tested=found.vllm_tested,
                log_name=f"{name}.log",
                logging_config=directory / f"{name}-logging.json",
            )
            self._replicas.append(_VllmPart(name, config, spec, devices[number], key, placement, first_ready, restarts))
        router_port = distinct_ports(1, {*ports, config.port})[0] if config.routed else None
        self.url = (
            self.replica_urls[0] if router_port is None else f"http://{in_url(config.inference_host)}:{router_port}"
        )
        """Where samples go: the only vLLM, or the router."""
        self.ports = frozenset(ports if router_port is None else [*ports, router_port])

    @property
    def replica_urls(self) -> tuple[str, ...]:
        return tuple(replica.spec.url for replica in self._replicas)

    @property
    def watches(self) -> tuple[str, ...]:
        """The names of the parts that others need."""
        return tuple(replica.watch_name for replica in self._replicas)

    def parts(self, needs: tuple[str, ...]) -> list[Part]:
        return [part for replica in self._replicas for part in replica.parts(needs)]


class _VllmPart:
    """One vLLM and its watchdog."""

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        spec: ServerSpec,
        devices: Sequence[str],
        key: str,
        placement: Placement,
        first_ready: StartObserver,
        restarts: RestartMetrics,
    ) -> None:
        self.spec = spec
        self.watch_name = f"{name} watch"
        self._name = name
        self._config = config
        self._devices = devices
        self._key = key
        self._placement = placement
        self._first_ready = first_ready
        self._restarts = restarts
        self._killed = False
        """The watchdog has killed the running vLLM."""
        self._server: ServerHandle | None = None

    def parts(self, needs: tuple[str, ...]) -> list[Part]:
        return [
            Part(
                self._name,
                needs,
                start=self._start,
                supervise=lambda: self._started.supervised(),
                duty=f"supervising {self._name}",
                stop=lambda: self._started.stop(INFERENCE_GRACE_S),
                grace_s=INFERENCE_GRACE_S,
            ),
            Part(self.watch_name, (self._name,), supervise=self._watch, duty=f"watching whether {self._name} hangs"),
        ]

    @property
    def _started(self) -> ServerHandle:
        assert self._server is not None
        return self._server

    async def _start(self) -> None:
        if (file := self.spec.env.get(LOGGING_CONFIG)) is not None:
            await asyncio.to_thread(Path(file).write_text, json.dumps(vllm_logging(self._name)))
        self._server = await self._placement.start(self.spec, self._devices, self._ended)
        self._first_ready.watch(self._name, self._server)

    def _ended(self, code: int) -> None:
        cause = cause_of_vllm(code, self._started.log_tail(TAIL_LINES))
        if cause is not None:
            option = options_named(self._config, cause.sentence)
            prefix = f"{option}: vLLM refuses it" if option else "vLLM cannot start"
            cause = Cause(f"{prefix}: {cause.sentence}", cause.final)
        self._restarts.ended(
            "vllm", "hung" if self._killed else "config" if cause is not None and cause.final else "died"
        )
        self._killed = False
        self._first_ready.ended(self._name, code, cause)

    async def _watch(self) -> None:
        options = self._config.backend_config.inference
        client = VllmClient(self._started.url, self._key)
        timeouts: dict[Probe, float] = {"/health": options.health_timeout_s, "/is_sleeping": options.step_timeout_s}
        watchdog = Watchdog(
            client,
            self._started,
            timeouts,
            interval_s=options.probe_interval_s,
            name=self._log_name,
            on_kill=self._note_kill,
        )
        try:
            await watchdog.run()
        finally:
            await client.close()

    def _note_kill(self) -> None:
        self._killed = True

    @property
    def _log_name(self) -> str:
        return "vLLM" if self._name == VLLM else self._name


def in_url(host: str) -> str:
    """A host as a URL has it."""
    return f"[{host}]" if ":" in host else host


def distinct_ports(count: int, taken: Collection[int] = ()) -> list[int]:
    """Free ports, none of them in `taken`. Raises OSError."""
    ports: list[int] = []
    while len(ports) < count:
        if (port := free_port()) not in ports and port not in taken:
            ports.append(port)
    return ports
