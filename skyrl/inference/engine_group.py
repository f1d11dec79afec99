"""The inference servers as the engine sees them: wait, warm up, publish the URL, watch, withdraw, start over.

Knows health and the order of things. Deliberately does not start servers (the launcher does, as the engine's
siblings), knows no database (the publisher is a callback) and no samples (the API sends those itself).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import httpx

from skyrl.backends.base import InferenceStatePublisher
from skyrl.inference.adapter_host import AdapterHost
from skyrl.inference.vllm_client import VllmClient, VllmError
from skyrl.types.weights import AdapterVersion

logger = logging.getLogger(__name__)


class EngineGroup:
    """Replicas that serve the same model. `proxy_url` is what clients use; a single replica is its own proxy.

    The URL is published while every replica is ready. `failures` failed probes in a row withdraw it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str,
        publisher: InferenceStatePublisher,
        host: AdapterHost,
        *,
        proxy_url: str | None = None,
        starting_interval_s: float = 0.1,
        watching_interval_s: float = 1.0,
        failures: int = 3,
    ) -> None:
        if proxy_url is None and len(urls) != 1:
            raise ValueError(f"{len(urls)} replicas need a proxy_url in front of them")
        self._replicas = [VllmClient(url, api_key) for url in urls]
        self._proxy_url = proxy_url or urls[0]
        self._publisher = publisher
        self._host = host
        self._starting_interval_s = starting_interval_s
        self._watching_interval_s = watching_interval_s
        self._failures = failures
        self._state = dict.fromkeys(urls, "starting")
        self._published: str | None = None
        self._changed = asyncio.Event()
        """Whether what is published may not be true any more."""
        self._running = False
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def ready(self) -> bool:
        return not self.reason

    @property
    def reason(self) -> str:
        """Why the group is not ready, for people; empty when it is."""
        return "; ".join(f"vLLM at {url}: {state}" for url, state in self._state.items() if state)

    async def run(self) -> None:
        """Watch every replica until `close` (or cancellation)."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = [tasks.create_task(self._watch(replica)) for replica in self._replicas]
                tasks.create_task(self._publish_changes())
                await self._closing.wait()
                for watch in watches:
                    watch.cancel()
                self._changed.set()
        finally:
            self._running = False
            self._ended.set()

    async def close(self) -> None:
        """End `run` and withdraw the URL. The servers keep running: they are not the engine's."""
        self._closing.set()
        if self._running:
            await self._ended.wait()
        self._state = dict.fromkeys(self._state, "closed")
        await self._publish(always=True)
        for replica in self._replicas:
            await replica.close()

    async def publish_adapter(self, adapter: AdapterVersion) -> None:
        """Load an adapter on every replica that is ready. The others load it when it is first asked for.

        Raises VllmError when a replica refuses it (it is then not to be used), and what `AdapterHost.bring` raises.
        """
        ready = [replica for replica in self._replicas if not self._state[replica.url]]
        if ready:
            directory = Path(await self._host.bring(adapter))
            await asyncio.gather(*(replica.load_adapter(adapter.name, directory) for replica in ready))

    async def retire_adapter(self, name: str) -> None:
        """Unload an adapter everywhere. Only after this returned may its directory be deleted, once drained.

        vLLM reads an evicted adapter's directory again, and dies for all tenants if it is gone.
        """

        async def unload(replica: VllmClient) -> None:
            try:
                await replica.unload_adapter(name)
            except httpx.ConnectError:  # not running: it has nothing loaded
                logger.info("adapter %s not unloaded from %s: not reachable", name, replica.url)

        await asyncio.gather(*(unload(replica) for replica in self._replicas))

    async def sleep(self) -> None:
        """Take device memory from all replicas. Raises VllmError, or httpx.TransportError where one is not there."""
        await asyncio.gather(*(replica.sleep() for replica in self._replicas))

    async def wake(self) -> None:
        """Give it back to them; one that is awake stays so. Raises as `sleep` does."""
        await asyncio.gather(*(replica.wake() for replica in self._replicas))

    async def _watch(self, replica: VllmClient) -> None:
        while True:
            while not await replica.health():  # noqa: ASYNC110 - another process, there is no event to wait for
                await asyncio.sleep(self._starting_interval_s)
            self._set(replica, "warming up")
            try:
                if not await replica.is_sleeping():  # who put it to sleep had found it warm, and wakes it
                    await replica.warm_up()
            except (VllmError, httpx.TransportError) as error:
                self._set(replica, f"warm-up failed: {error or type(error).__name__}")
                await asyncio.sleep(self._watching_interval_s)
                continue
            self._set(replica, "")
            await self._until_lost(replica)
            self._set(replica, f"not healthy ({self._failures} probes in a row)")

    async def _until_lost(self, replica: VllmClient) -> None:
        failed = 0
        while failed < self._failures:
            # After a failure look again soon: a dead server is known within a second, a slow one has its time.
            await asyncio.sleep(self._starting_interval_s if failed else self._watching_interval_s)
            failed = 0 if await replica.health() else failed + 1
            self._changed.set()  # again, in case the publisher failed

    def _set(self, replica: VllmClient, state: str) -> None:
        self._state[replica.url] = state
        logger.info("vLLM at %s: %s", replica.url, state or "ready")
        self._changed.set()

    async def _publish_changes(self) -> None:
        """One at a time, in their order; `close` publishes the last one."""
        while not self._closing.is_set():
            await self._changed.wait()
            self._changed.clear()
            if not self._closing.is_set():
                await self._publish()

    async def _publish(self, *, always: bool = False) -> None:
        """Tell the publisher what is true now, if it was last told otherwise; a failure is logged and retried.

        Before the first URL nothing is withdrawn: after a restart of the engine alone, the URL that its
        predecessor published is good, and samples go on.
        """
        url = self._proxy_url if self.ready else None
        if url == self._published and not always:
            return
        try:
            await self._publisher(url)
        except Exception:  # whatever a callback raises must not end the watch over the servers
            logger.exception("the inference URL %s could not be published", url)
        else:
            self._published = url
