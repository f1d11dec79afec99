"""Publishes the metrics of each vLLM, as `skyrl.inference.metrics` shows them, beside those of skyrl's own
processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import httpx

from skyrl.base.config.base_models import BaseModelSlot
from skyrl.inference.metrics import shown
from skyrl.inference.vllm_client import VllmClient, VllmError
from skyrl.runtime.metrics.files import MetricsDirectory

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
TIMEOUT_S = 3.0


class VllmMetrics:
    """A vLLM that does not answer is left out, once its last metrics are old. `urls`: the replicas, by number. `role`:
    that of their base model."""

    def __init__(
        self,
        urls: Sequence[str],
        key: str,
        directory: MetricsDirectory,
        first: int = 0,
        role: BaseModelSlot | None = None,
    ) -> None:
        self._role = role or BaseModelSlot()
        self._clients = {number: VllmClient(url, key) for number, url in enumerate(urls, first)}
        self._directory = directory

    async def run(self) -> None:
        """Read and publish until cancelled."""
        try:
            while True:
                await asyncio.gather(*map(self.publish, self._clients))
                await asyncio.sleep(PERIOD_S)
        finally:
            await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def publish(self, number: int) -> None:
        """Publish one replica's metrics. A failure is only logged: the watch over vLLM says more."""
        try:
            text = await self._clients[number].metrics(TIMEOUT_S)
            await asyncio.to_thread(self._write, number, text)
        except (httpx.RequestError, VllmError, OSError, ValueError) as error:
            logger.debug("replica %d shows no metrics: %s", number, error)

    def _write(self, number: int, text: str) -> None:
        self._directory.write(f"{self._role.process('vllm')}-{number}", shown(text, number, self._role.labels))
