"""Loads an adapter into an inference server that does not know the adapter: one load for all samples that need it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import msgspec

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference import load_route
from skyrl.inference.adapter_host import AdapterHost, AdapterMissing, AdapterUnavailable
from skyrl.inference.metrics import AdapterMetrics, Load
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.error_messages import describe, server_failure
from skyrl.server.sampling.health import Health, health_of
from skyrl.server.sampling.transport import CompletionTransport, Interrupted, NotAccepted

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0


class AdapterLoads:
    """One load at a time per adapter and server; all samples that need the adapter wait for the same load. `host`
    brings the files to the server. Each load counts as `adapter_reloads`."""

    def __init__(
        self,
        transport: CompletionTransport,
        host: AdapterHost,
        headers: Mapping[str, str],
        counts: Counter[str],
        metrics: AdapterMetrics | None = None,
    ) -> None:
        self._transport = transport
        self._host = host
        self._headers = headers
        self._counts = counts
        self._metrics = metrics or AdapterMetrics()
        self._loading: dict[tuple[str, int, str], asyncio.Task[None]] = {}

    async def load(self, adapter: AdapterVersion, endpoint: Endpoint) -> None:
        """Return when the adapter is loaded, or when the server cannot be reached or is dying.

        Raises FailedRequest if the server refuses the load, with the server's answer, or if the adapter's files are
        missing. Raises AdapterUnavailable if the files cannot be brought to the server now. If one caller is cancelled,
        the load goes on for the others.
        """
        key = (endpoint.url, endpoint.generation, adapter.name)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(adapter, endpoint))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(task)

    async def _load(self, adapter: AdapterVersion, endpoint: Endpoint) -> None:
        self._counts["adapter_reloads"] += 1
        with self._metrics.load() as load:
            await self._bring_and_load(adapter, endpoint, load)

    async def _bring_and_load(self, adapter: AdapterVersion, endpoint: Endpoint, load: Load) -> None:
        failure = f"the inference server lost adapter {adapter.name} and cannot load it again"
        try:
            directory = await self._host.bring(adapter)
        except AdapterMissing as error:
            raise server_failure(f"{failure}: {error}") from error
        except AdapterUnavailable as error:
            logger.warning("%s; samples from it wait (%s)", error, error.reason)
            raise
        body = msgspec.json.encode(load_route.load_request(adapter.name, directory))
        try:
            answer = await self._transport.post(endpoint.url + load_route.PATH, body, self._headers, LOAD_TIMEOUT_S)
        except (NotAccepted, Interrupted) as error:
            logger.warning("adapter %s could not be loaded again: %s", adapter.name, error)
            return  # the next try of the sample shows whether the server is back
        load.ok = load_route.is_loaded(answer.status, answer.body)
        if load.ok:
            return
        if load_route.is_missing(answer.status, answer.body):
            raise server_failure(f"{failure}: {AdapterMissing(adapter)}")
        if load_route.is_to_repeat(answer.status, answer.body):
            error = AdapterUnavailable(adapter, RuntimeError(describe(answer)))
            logger.warning("%s; samples from it wait (%s)", error, error.reason)
            raise error
        if answer.status >= 500 and await health_of(self._transport, endpoint, self._headers) is not Health.ALIVE:
            return
        raise server_failure(f"{failure}: {describe(answer)}")

    async def close(self) -> None:
        loads = list(self._loading.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
