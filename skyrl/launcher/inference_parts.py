"""The parts for inference: the vLLM of this server, and the watchdog that kills it when it hangs.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

from pathlib import Path

from skyrl.config.server import ServerConfig
from skyrl.inference.placement import Placement, ServerHandle, free_port
from skyrl.inference.vllm_client import VllmClient
from skyrl.inference.vllm_command import inference_devices, options_named, vllm_spec
from skyrl.inference.watchdog import Watchdog
from skyrl.launcher.first_ready import FirstReady
from skyrl.launcher.parts import Part
from skyrl.launcher.preflight import Findings
from skyrl.processes.startup import TAIL_LINES, Cause, cause_of_vllm

INFERENCE_GRACE_S = 5.0
VLLM, VLLM_WATCH = "vllm", "vllm watch"
"""Names of parts."""


class InferenceParts:
    """Makes the parts of vLLM and its watchdog. `url` is known before vLLM is started."""

    def __init__(
        self,
        config: ServerConfig,
        found: Findings,
        key: str,
        directory: Path,
        placement: Placement,
        first_ready: FirstReady,
    ) -> None:
        self._config = config
        self._key = key
        self._placement = placement
        self._first_ready = first_ready
        self._devices = inference_devices(config, found.devices) if found.devices else []
        self._spec = vllm_spec(
            config,
            config.backend_config.inference.port or free_port(),
            key,
            cuda=bool(found.devices),
            directory=directory,
            offline=found.offline,
            tested=found.vllm_tested,
        )
        self._server: ServerHandle | None = None

    @property
    def url(self) -> str:
        return self._spec.url

    def parts(self, needs: tuple[str, ...]) -> list[Part]:
        return [
            Part(
                VLLM,
                needs,
                start=self._start,
                supervise=lambda: self._started.supervised(),
                duty="supervising vLLM",
                stop=lambda: self._started.stop(INFERENCE_GRACE_S),
                grace_s=INFERENCE_GRACE_S,
            ),
            Part(VLLM_WATCH, (VLLM,), supervise=self._watch, duty="watching whether vLLM hangs"),
        ]

    @property
    def _started(self) -> ServerHandle:
        assert self._server is not None
        return self._server

    async def _start(self) -> None:
        self._server = await self._placement.start(self._spec, self._devices, self._ended)
        self._first_ready.watch(VLLM, self._server)

    def _ended(self, code: int) -> None:
        cause = cause_of_vllm(code, self._started.log_tail(TAIL_LINES))
        if cause is not None:
            option = options_named(self._config, cause.sentence)
            prefix = f"{option}: vLLM refuses it" if option else "vLLM cannot start"
            cause = Cause(f"{prefix}: {cause.sentence}", cause.final)
        self._first_ready.ended(VLLM, code, cause)

    async def _watch(self) -> None:
        options = self._config.backend_config.inference
        client = VllmClient(self._started.url, self._key)
        watchdog = Watchdog(
            client,
            self._started,
            interval_s=options.probe_interval_s,
            health_timeout_s=options.health_timeout_s,
            step_timeout_s=options.step_timeout_s,
        )
        try:
            await watchdog.run()
        finally:
            await client.close()
