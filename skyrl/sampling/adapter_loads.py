"""Tells an inference server of an adapter that it does not know (any more), once for all samples that need it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import msgspec

from skyrl.sampling.endpoint import Endpoint
from skyrl.sampling.error_messages import describe, server_failure
from skyrl.sampling.health import Health, health_of
from skyrl.sampling.transport import CompletionTransport, Interrupted, NotAccepted

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0


class AdapterLoads:
    """One load at a time per adapter and server, whoever waits for it. Each counts as `adapter_reloads`."""

    def __init__(self, transport: CompletionTransport, headers: Mapping[str, str], counts: Counter[str]) -> None:
        self._transport = transport
        self._headers = headers
        self._counts = counts
        self._loading: dict[tuple[str, int, str], asyncio.Task[None]] = {}

    async def load(self, name: str, path: str, endpoint: Endpoint) -> None:
        """Return when it is loaded, or when the server has died of something meanwhile.

        Raises FailedRequest with what the server said. A caller that is cancelled leaves the load to the others.
        """
        key = (endpoint.url, endpoint.generation, name)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(name, path, endpoint))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(task)

    async def _load(self, name: str, path: str, endpoint: Endpoint) -> None:
        self._counts["adapter_reloads"] += 1
        body = msgspec.json.encode({"lora_name": name, "lora_path": path})
        url = f"{endpoint.url}/v1/load_lora_adapter"
        try:
            answer = await self._transport.post(url, body, self._headers, LOAD_TIMEOUT_S)
        except (NotAccepted, Interrupted) as error:
            logger.warning("adapter %s could not be loaded again: %s", name, error)
            return  # the sample is sent again, and finds out whether the server is back
        if answer.status == 200 or (answer.status == 400 and b"already been loaded" in answer.body):
            return
        if answer.status >= 500 and await health_of(self._transport, endpoint, self._headers) is not Health.ALIVE:
            return
        raise server_failure(f"the inference server lost adapter {name} and cannot load it again: {describe(answer)}")

    async def close(self) -> None:
        loads = list(self._loading.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
