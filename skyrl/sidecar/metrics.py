"""The sidecar's figures for `GET /metrics`, and those of its vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl.metrics.files import MetricsDirectory
from skyrl.metrics.vllm import shown
from skyrl.sidecar.errors import SidecarError
from skyrl.sidecar.in_flight import InFlight
from skyrl.sidecar.pause import Pause
from skyrl.sidecar.vllm import Vllm

logger = logging.getLogger(__name__)

PERIOD_S = 5.0


class SidecarMetrics(Collector):
    """Read at each writing, on another thread."""

    def __init__(self, in_flight: InFlight, pause: Pause) -> None:
        self._in_flight, self._pause = in_flight, pause

    def collect(self) -> Iterable[Metric]:
        about = "Samples that vLLM has."
        yield GaugeMetricFamily("skyrl_sidecar_running", about, value=self._in_flight.running)
        about = "Samples that wait in the sidecar, because generation is paused."
        yield GaugeMetricFamily("skyrl_sidecar_waiting", about, value=self._in_flight.waiting)
        about = "1 while somebody has paused generation."
        yield GaugeMetricFamily("skyrl_sidecar_paused", about, value=self._pause.mode is not None)


class VllmFigures:
    """Publishes the metrics of the vLLM with this number."""

    def __init__(self, vllm: Vllm, number: int, published: MetricsDirectory) -> None:
        self._vllm, self._number, self._published = vllm, number, published

    async def run(self) -> None:
        """Read and publish until cancelled. A failure is only logged: `/health` says more."""
        while True:
            try:
                text = await self._vllm.call_raw("GET", "/metrics")
                await asyncio.to_thread(self._write, text.decode())
            except (SidecarError, OSError, ValueError) as error:
                logger.debug("vLLM shows no metrics: %s", error)
            await asyncio.sleep(PERIOD_S)

    def _write(self, text: str) -> None:
        self._published.write(f"vllm-{self._number}", shown(text, self._number))
