"""The replicas of one inference service: wait, warm up, catch up on adapters, publish the URL, watch, withdraw.

Knows which replica may be used and when. Deliberately does not start servers (the launcher does, as the engine's
siblings), knows no database (the publisher and the list of adapters in use are callbacks) and sends no samples.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import httpx

from skyrl.inference.adapter_host import AdapterMissing, AdapterUnavailable
from skyrl.inference.replica import NoAnswer, Replica, ReplicaState
from skyrl.inference.vllm_client import VllmError
from skyrl.types.weights import AdapterVersion

logger = logging.getLogger(__name__)

InferenceStatePublisher = Callable[[str | None], Awaitable[None]]
"""Called with the URL to which samples go, on every change, and with None when there is none."""
AdaptersInUse = Callable[[], Awaitable[Sequence[AdapterVersion]]]
"""The adapters that a replica is to have before it is ready, the most important first."""


class EngineGroup:
    """Replicas that serve the same model. `proxy_url` is the URL to publish; a single replica is its own proxy.

    The URL is published while at least one replica is ready. `failures` failed probes in a row make a replica lost.
    `grace_s` is how long a replica that is slow to load or to unload adapters holds up a publication or a sweep.
    Replicas may be added, drained and removed at any time.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        publisher: InferenceStatePublisher,
        in_use: AdaptersInUse,
        *,
        proxy_url: str | None = None,
        starting_interval_s: float = 0.1,
        watching_interval_s: float = 1.0,
        failures: int = 3,
        grace_s: float = 1.0,
    ) -> None:
        self._replicas: dict[str, Replica] = {}
        self._proxy_url = proxy_url
        self._publisher = publisher
        self._in_use = in_use
        self._starting_interval_s = starting_interval_s
        self._watching_interval_s = watching_interval_s
        self._failures = failures
        self._grace_s = grace_s
        self._tasks: asyncio.TaskGroup | None = None
        """While `run` runs."""
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._published: str | None = None
        self._changed = asyncio.Event()
        """Whether what is published may not be true any more."""
        self._left_out: set[AdapterVersion] = set()
        """Adapters whose loading a replica has not survived: the next start would die of them again."""
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        for replica in replicas:
            self.add(replica)

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    @property
    def ready(self) -> bool:
        return any(replica.state is ReplicaState.READY for replica in self.replicas)

    @property
    def reason(self) -> str:
        """Why the group is not ready, for people; empty when it is."""
        if self.ready:
            return ""
        said = (f"vLLM at {r.addresses.admin}: {r.trouble or r.state}" for r in self.replicas)
        return "; ".join(said) or "there is no inference server"

    def add(self, replica: Replica) -> None:
        """Watch one more replica, and use it once it is ready. Raises ValueError for a second one without a proxy, and
        for an id that another one has."""
        if replica.id in self._replicas:
            raise ValueError(f"there is a replica {replica.id!r} already")
        if self._proxy_url is None and self._replicas:
            raise ValueError(f"{len(self._replicas) + 1} replicas need a proxy_url in front of them")
        self._replicas[replica.id] = replica
        self._watch_in_background(replica)

    def drain(self, replica_id: str) -> None:
        """Use a replica for no new sample. Its server still runs, so its adapters' files are kept until they are
        unloaded or the replica is removed."""
        self._set(self._replicas[replica_id], ReplicaState.DRAINING)
        if (watch := self._watches.pop(replica_id, None)) is not None:
            watch.cancel()

    async def remove(self, replica_id: str) -> None:
        """Forget a replica whose server has ended: it reads no file any more, and is asked for nothing."""
        self.drain(replica_id)
        replica = self._replicas.pop(replica_id)
        await replica.close()

    async def run(self) -> None:
        """Watch every replica until `close` (or cancellation)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for replica in self.replicas:
                    self._watch_in_background(replica)
                tasks.create_task(self._publish_changes())
                await self._closing.wait()
                for watch in self._watches.values():
                    watch.cancel()
                self._changed.set()
        finally:
            self._tasks = None
            self._ended.set()

    async def close(self) -> None:
        """End `run` and withdraw the URL. The servers keep running: they are not the engine's."""
        self._closing.set()
        if self._tasks is not None:
            await self._ended.wait()
        for replica in self.replicas:
            self._set(replica, ReplicaState.DRAINING)
        await self._publish(always=True)
        for replica in self.replicas:
            await replica.close()

    async def publish_adapter(self, adapter: AdapterVersion) -> None:
        """Load an adapter on every replica that is ready, all at once. One that warms up loads it before it is ready.

        Once one replica has loaded it, this returns when no other has answered for `grace_s` seconds. A slower replica
        goes on in the background. If it is lost meanwhile, it loads the adapter before it is ready again. A sample that
        reaches it before it has loaded the adapter gets a 404, and loads the adapter. Until one replica has loaded it,
        this waits until each has answered, is lost, or is beyond its bound.

        Raises VllmError when a replica refuses the adapter (it is then not to be used), httpx.TransportError when no
        replica that is ready has answered, and what `AdapterHost.bring` raises.
        """
        for replica in self.replicas:
            if replica.state is ReplicaState.WARMING:
                replica.wanted.add(adapter)
        silent = {replica.in_background(self._deliver(replica, adapter)) for replica in self._ready_ones()}
        outcomes: list[BaseException | None] = []
        while silent:
            grace_s = self._grace_s if None in outcomes else None
            answered, silent = await asyncio.wait(silent, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not answered:
                break
            removed = NoAnswer("the replica was removed")
            outcomes += [removed if task.cancelled() else task.result() for task in answered]
        _raise_failure(outcomes)

    async def _deliver(self, replica: Replica, adapter: AdapterVersion) -> Exception | None:
        """Load an adapter on a replica. Returns why it could not be loaded: nobody may wait for this any more."""
        try:
            await self._ask(replica, replica.load(adapter))
        except Exception as error:
            if not isinstance(error, httpx.TransportError):  # `_ask` logs those
                logger.warning("vLLM at %s has not loaded adapter %s: %s", replica.addresses.admin, adapter.name, error)
            if isinstance(error, NoAnswer) and replica.state is not ReplicaState.READY:
                replica.wanted.add(adapter)
            return error
        return None

    async def retire(self, adapters: Sequence[AdapterVersion]) -> set[AdapterVersion]:
        """Unload adapters everywhere. Returns those whose files no replica may read any more; only their files may be
        deleted. vLLM reads an evicted adapter's files again, and dies for all tenants if they are gone.

        A replica that does not answer may come back with its adapters loaded, so it keeps their files until it has
        answered, refuses connections, or is removed. Replicas have `grace_s` seconds; what one has not unloaded by then
        it unloads in the background, and a later call returns it.
        """
        self._left_out.difference_update(adapters)
        unloading = [replica.retire(adapters) for replica in self.replicas]
        if unloading:
            ended, _ = await asyncio.wait(unloading, timeout=self._grace_s)
            for task in ended:
                if not task.cancelled():
                    task.result()
        return {adapter for adapter in adapters if not any(replica.may_read(adapter) for replica in self.replicas)}

    async def sleep(self) -> None:
        """Take device memory from all ready replicas. Raises VllmError, or httpx.TransportError when none answers."""
        await self._on_ready(lambda replica: replica.sleep())

    async def wake(self) -> None:
        """Give it back to them; one that is awake stays so. Raises as `sleep` does."""
        await self._on_ready(lambda replica: replica.wake())

    async def _on_ready(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Call every ready replica at once, and wait for all."""
        asked = (self._ask(replica, call(replica)) for replica in self._ready_ones())
        _raise_failure(await asyncio.gather(*asked, return_exceptions=True))

    async def _ask(self, replica: Replica, call: Awaitable[None]) -> None:
        """Wait for a call to a ready replica. If the replica answers neither the call nor `/health`, it is lost."""
        try:
            await call
        except httpx.TransportError as error:
            logger.warning("%s", error or type(error).__name__)
            if replica.state is ReplicaState.READY and not await replica.is_healthy():
                self._lose(replica, f"lost ({error or type(error).__name__})")
            raise

    def _ready_ones(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is ReplicaState.READY]

    def _watch_in_background(self, replica: Replica) -> None:
        if self._tasks is not None and replica.state is not ReplicaState.DRAINING:
            self._watches[replica.id] = self._tasks.create_task(self._watch(replica))

    async def _watch(self, replica: Replica) -> None:
        while True:
            while not await replica.is_healthy():  # noqa: ASYNC110 - another process, there is no event to wait for
                await asyncio.sleep(self._starting_interval_s)
            self._set(replica, ReplicaState.WARMING)
            try:
                await self._prepare(replica)
            except (VllmError, httpx.TransportError) as error:
                self._set(replica, ReplicaState.LOST, f"warm-up failed: {error or type(error).__name__}")
                await asyncio.sleep(self._watching_interval_s)
                continue
            self._set(replica, ReplicaState.READY)
            await self._until_lost(replica)

    async def _prepare(self, replica: Replica) -> None:
        """Warm the replica up and load what is in use. One that sleeps is left alone: the engine that put it to sleep
        had found it warm, and wakes it."""
        if replica.incarnation is None:
            replica.forget_adapters()
        if await replica.is_sleeping():
            return
        await replica.warm_up()
        try:
            in_use = await self._in_use()
        except Exception:  # whatever a callback raises must not end the watch over the servers
            logger.exception("the adapters in use are not known; they are loaded when a sample asks for them")
            in_use = []
        order = [adapter for adapter in in_use if adapter not in replica.adapters | self._left_out]
        replica.wanted.update(order)
        while replica.wanted:
            adapter = next((known for known in order if known in replica.wanted), None) or next(iter(replica.wanted))
            await self._catch_up(replica, adapter)

    async def _catch_up(self, replica: Replica, adapter: AdapterVersion) -> None:
        """Load one adapter before the replica is ready. One that cannot be loaded is left to the first sample that asks
        for it, so that a bad adapter keeps no replica away. Raises httpx.TransportError when the replica is gone."""
        try:
            await replica.load(adapter)
        except (VllmError, AdapterMissing) as error:
            logger.warning("adapter %s was not loaded before vLLM is used: %s", adapter.name, error)
        except AdapterUnavailable as error:
            logger.warning("adapter %s was not loaded before vLLM is used: %s (%s)", adapter.name, error, error.reason)
        except httpx.TransportError as error:
            logger.warning("adapter %s was not loaded before vLLM is used: %s", adapter.name, error)
            if not await replica.is_healthy():
                self._left_out.add(adapter)
                raise

    async def _until_lost(self, replica: Replica) -> None:
        failed, incarnation = 0, replica.incarnation
        while failed < self._failures:
            # After a failure look again soon: a dead server is known within a second, a slow one has its time.
            if await replica.lost_within(self._starting_interval_s if failed else self._watching_interval_s):
                return
            if not await replica.is_healthy():
                failed += 1
            elif replica.incarnation != incarnation:
                self._set(replica, ReplicaState.LOST, "started again")
                return
            else:
                failed = 0
            self._changed.set()  # again, in case the publisher failed
        self._set(replica, ReplicaState.LOST, f"not healthy ({self._failures} probes in a row)")

    def _lose(self, replica: Replica, trouble: str) -> None:
        """A ready replica does not answer. One that drains, or that was found to be lost already, stays what it is."""
        if replica.state is ReplicaState.READY:
            self._set(replica, ReplicaState.LOST, trouble)

    def _set(self, replica: Replica, state: ReplicaState, trouble: str = "") -> None:
        replica.become(state, trouble)
        logger.info("vLLM at %s: %s", replica.addresses.admin, trouble or state)
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
        url = (self._proxy_url or self.replicas[0].addresses.data) if self.ready else None
        if url == self._published and not always:
            return
        try:
            await self._publisher(url)
        except Exception:  # whatever a callback raises must not end the watch over the servers
            logger.exception("the inference URL %s could not be published", url)
        else:
            self._published = url


def _raise_failure(outcomes: Sequence[BaseException | None]) -> None:
    """Raise what a replica said against a call, or the first of the failures when no replica has answered."""
    failures = [outcome for outcome in outcomes if outcome is not None]
    for failure in failures:
        if not isinstance(failure, httpx.TransportError):
            raise failure
    if failures and len(failures) == len(outcomes):
        raise failures[0]
