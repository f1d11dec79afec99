"""The sidecar's figures for `GET /metrics`, and those of its vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl.inference.metrics import shown
from skyrl.inference.sidecar.call import Call
from skyrl.inference.sidecar.errors import SidecarError
from skyrl.inference.sidecar.in_flight import InFlight
from skyrl.inference.sidecar.pause import Pause
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.runtime.metrics.files import CONTENT_TYPE, MetricsDirectory

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
TIMEOUT_S = 1.0


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


class Figures:
    """Publishes the metrics of the vLLM with this number, and answers `GET /metrics` with these and the sidecar's. The
    router of a plane answers for all processes."""

    def __init__(self, vllm: Vllm, number: int, published: MetricsDirectory) -> None:
        self._vllm, self._number, self._published = vllm, number, published
        self._names = (f"sidecar-{number}", f"vllm-{number}")

    async def run(self) -> None:
        """Publish until cancelled, for those who ask the router."""
        while True:
            await self._publish()
            await asyncio.sleep(PERIOD_S)

    async def answer(self, call: Call) -> None:
        """vLLM's metrics as they are now, if it answers at once."""
        await self._publish()
        text = await asyncio.to_thread(self._published.read, self._names)
        await call.answer(200, text.encode(), [(b"content-type", CONTENT_TYPE.encode())])

    async def _publish(self) -> None:
        """A failure is only logged: `/health` says more."""
        try:
            text = await self._vllm.call_raw("GET", "/metrics", timeout_s=TIMEOUT_S)
            await asyncio.to_thread(self._write, text.decode())
        except (SidecarError, OSError, ValueError) as error:
            logger.debug("vLLM shows no metrics: %s", error)

    def _write(self, text: str) -> None:
        self._published.write(f"vllm-{self._number}", shown(text, self._number))
