"""The parts for inference on this machine: the vLLMs of this server, each with a watchdog that kills it when it hangs.

`ServerParts` are the parts of one inference server. They ask the server's kind how it is probed and why it has ended,
and do not know where the server runs: a `Placement` does. `InferenceParts` knows where samples go: to the only vLLM, or
to the router in front of several. `skyrl_processes` makes the router's part. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher.first_ready import StartObserver
from skyrl.cli.launcher.metrics import RestartMetrics
from skyrl.cli.launcher.parts import Part
from skyrl.cli.launcher.preflight import Findings, taken_port
from skyrl.inference.engine_kinds import VLLM, Vllm
from skyrl.inference.placement import Placement, ServerHandle, ServerPlan
from skyrl.inference.vllm_client import VllmClient
from skyrl.inference.vllm_command import inference_devices
from skyrl.inference.watchdog import Watchdog
from skyrl.runtime.processes.ports import LOOPBACK, HeldPorts
from skyrl.runtime.processes.startup import TAIL_LINES


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


logger = logging.getLogger(__name__)

INFERENCE_GRACE_S = 5.0


async def wherever(server: ServerHandle, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Run `work` with the server's URL until cancelled, and anew with each URL that the server moves to. Raises what
    `work` raises."""
    while True:
        url = server.url
        tasks = [asyncio.create_task(server.until_moved(url))]
        if url is not None:
            tasks.append(asyncio.create_task(work(url)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class ServerParts:
    """`shown` is the server's name in log lines; by default that of the plan."""

    def __init__(
        self,
        plan: ServerPlan,
        kind: Vllm,
        placement: Placement,
        observer: StartObserver,
        restarts: RestartMetrics,
        *,
        probe_interval_s: float,
        shown: str = "",
    ) -> None:
        self.name = plan.name
        self.watch_name = f"{plan.name} watch"
        self.has_answered = False
        """Whether the server has answered a probe since this process began."""
        self._plan = plan
        self._kind = kind
        self._placement = placement
        self._observer = observer
        self._restarts = restarts
        self._probe_interval_s = probe_interval_s
        self._shown = shown or plan.name
        self._killed = False
        """The watchdog has killed the running server."""
        self._server: ServerHandle | None = None

    def parts(self, needs: tuple[str, ...]) -> list[Part]:
        return [
            Part(
                self.name,
                needs,
                start=self._start,
                supervise=lambda: self.server.supervised(),
                duty=f"supervising {self.name}",
                stop=lambda: self.server.stop(INFERENCE_GRACE_S),
                grace_s=INFERENCE_GRACE_S,
            ),
            Part(self.watch_name, (self.name,), supervise=self._watch, duty=f"watching whether {self.name} hangs"),
        ]

    @property
    def server(self) -> ServerHandle:
        """The server, once its part was started."""
        assert self._server is not None
        return self._server

    async def _start(self) -> None:
        self._server = await self._placement.start(self._plan, self._ended)
        self._observer.watch(self.name, self._server)

    def _ended(self, code: int) -> None:
        cause = self._kind.cause(code, self.server.log_tail(TAIL_LINES))
        if cause is not None:
            logger.warning("%s (%s): %s", self.name, self.server.url, cause.sentence)
        self._restarts.ended(
            "vllm", "hung" if self._killed else "config" if cause is not None and cause.final else "died"
        )
        self._killed = False
        self._observer.ended(self.name, code, cause)

    async def _watch(self) -> None:
        await wherever(self.server, self._watch_at)

    async def _watch_at(self, url: str) -> None:
        client = VllmClient(url, self._kind.key)
        watchdog = Watchdog(
            client,
            self.server,
            self._kind.probes,
            interval_s=self._probe_interval_s,
            name=self._shown,
            on_answer=self._note_answer,
            on_kill=self._note_kill,
        )
        try:
            await watchdog.run()
        finally:
            await client.close()

    def _note_answer(self) -> None:
        self.has_answered = True

    def _note_kill(self) -> None:
        self._killed = True
