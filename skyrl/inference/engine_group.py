"""The replicas of one inference service: waits for them, warms them up, loads weights, publishes the URL, watches.

Knows which replica may be used and when. Starts no server (the launcher does), uses no database (the publisher and the
list of adapters in use are callbacks) and sends no samples.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.adapter_host import AdapterMissing, AdapterUnavailable
from skyrl.inference.full_weights import FullWeightsOfReplicas, VersionFiles
from skyrl.inference.replica import NoAnswer, Replica, ReplicaState
from skyrl.inference.router_members import NotTold, RouterMembers
from skyrl.inference.vllm_client import VllmError
from skyrl.runtime.processes.supervision import set_within

logger = logging.getLogger(__name__)

InferenceStatePublisher = Callable[[str | None], Awaitable[None]]
"""Called on every change with the URL to which samples go, or with None when no replica is ready."""
AdaptersInUse = Callable[[], Awaitable[Sequence[AdapterVersion]]]
"""The adapters to load on a replica before it is ready, the most important first."""


class EngineGroup:
    """Replicas that serve the same model. `proxy_url` is the URL to publish; a single replica needs no proxy. `members`
    is told which replicas the proxy may use; None for a proxy that nobody tells. `weights` are the full weights of the
    replicas, if the replicas serve other weights than those that they were started with, and no adapters.
    `has_all`: no inference server runs that is not among `replicas`. Otherwise call `set_has_all` when that is so.

    The URL is published while at least one replica is ready. `failures` failed probes in a row make a replica lost.
    `grace_s` is how long a replica that is slow to load or unload adapters delays a publication or a sweep.
    Replicas may be added, drained and removed at any time.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        publisher: InferenceStatePublisher,
        in_use: AdaptersInUse,
        *,
        proxy_url: str | None = None,
        members: RouterMembers | None = None,
        weights: FullWeightsOfReplicas | None = None,
        has_all: bool = True,
        starting_interval_s: float = 0.1,
        watching_interval_s: float = 1.0,
        failures: int = 3,
        grace_s: float = 1.0,
    ) -> None:
        self._replicas: dict[str, Replica] = {}
        self._proxy_url = proxy_url
        self._members = members
        self._members_told = members is None
        """Whether the proxy was told at least once which replicas it may use."""
        self._has_all = has_all
        self._weights = weights
        self._publisher = publisher
        self._in_use = in_use
        self._starting_interval_s = starting_interval_s
        self._watching_interval_s = watching_interval_s
        self._failures = failures
        self._grace_s = grace_s
        self._tasks: asyncio.TaskGroup | None = None
        """Set while `run` runs."""
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._published: str | None = None
        self._changed = asyncio.Event()
        """Set when the published URL may be out of date."""
        self._deadly: set[AdapterVersion] = set()
        """Adapters during whose loading a replica died. They are not loaded again before a replica is ready."""
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
        """Why the group is not ready, for people; empty when the group is ready."""
        if self.ready:
            return ""
        reasons = (f"vLLM at {r.addresses.admin}: {r.trouble or r.state}" for r in self.replicas)
        return "; ".join(reasons) or "there is no inference server"

    def add(self, replica: Replica) -> None:
        """Watch one more replica, and use it once it is ready. Raises ValueError for a second replica without a proxy,
        and for an id that another replica has."""
        if replica.id in self._replicas:
            raise ValueError(f"there is a replica {replica.id!r} already")
        if self._proxy_url is None and self._replicas:
            raise ValueError(f"{len(self._replicas) + 1} replicas need a proxy_url in front of them")
        self._replicas[replica.id] = replica
        self._watch_in_background(replica)

    def drain(self, replica_id: str) -> None:
        """Send the replica no new samples. Its server still runs, so its adapters' files are kept until the adapters
        are unloaded or the replica is removed."""
        self._set(self._replicas[replica_id], ReplicaState.DRAINING)
        if (watch := self._watches.pop(replica_id, None)) is not None:
            watch.cancel()

    async def remove(self, replica_id: str) -> None:
        """Forget a replica after its server has ended: an ended server reads no files."""
        self.drain(replica_id)
        replica = self._replicas.pop(replica_id)
        self._changed.set()
        await replica.close()

    def set_has_all(self) -> None:
        """Every inference server that runs has been added by now: whatever else the proxy has is a server that has
        ended, perhaps before this engine started."""
        if not self._has_all:
            self._has_all = True
            self._changed.set()

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
        """End `run` and withdraw the URL. The servers keep running: the launcher owns them."""
        self._closing.set()
        if self._tasks is not None:
            await self._ended.wait()
        for replica in self.replicas:
            self._set(replica, ReplicaState.DRAINING)
        await self._publish(always=True)
        for replica in self.replicas:
            await replica.close()
        if self._members is not None:
            await self._members.close()

    async def publish_adapter(self, adapter: AdapterVersion) -> None:
        """Load an adapter on all ready replicas at once. A replica that warms up loads it before it is ready.

        Once one replica has loaded the adapter, this call ends when no other replica has answered for `grace_s`
        seconds. A slower replica goes on loading in the background. If that replica is lost before it has loaded the
        adapter, it loads the adapter before it is ready again. A sample that reaches a replica without the adapter gets
        a 404, and its API process loads the adapter. While no replica has loaded the adapter, this call waits until
        each replica has answered, is lost, or has exceeded its timeout.

        Raises VllmError when a replica refuses the adapter, httpx.TransportError when no ready replica has answered,
        and the errors of `AdapterHost.bring`.
        """
        for replica in self.replicas:
            if replica.state is ReplicaState.WARMING:
                replica.wanted.add(adapter)
        pending = {replica.in_background(self._deliver(replica, adapter)) for replica in self._ready_replicas()}
        outcomes: list[BaseException | None] = []
        while pending:
            grace_s = self._grace_s if None in outcomes else None
            answered, pending = await asyncio.wait(pending, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not answered:
                break
            removed = NoAnswer("the replica was removed")
            outcomes += [removed if task.cancelled() else task.result() for task in answered]
        _raise_failure(outcomes)

    async def publish_weights(self, wanted: VersionFiles) -> None:
        """Give all replicas a version of the full weights. Raises NotPublished when no replica can take it and one has
        said why; see `FullWeightsOfReplicas.publish`."""
        assert self._weights is not None
        await self._weights.publish(wanted, self._ready_replicas, self._lose, may_fail=True)

    async def want_weights(self, wanted: VersionFiles) -> None:
        """As `publish_weights`, unless this version is wanted already; replicas that refuse it are lost."""
        assert self._weights is not None
        if await self._weights.wanted() != wanted:
            await self._weights.publish(wanted, self._ready_replicas, self._lose, may_fail=False)

    async def _deliver(self, replica: Replica, adapter: AdapterVersion) -> Exception | None:
        """Load an adapter on a replica. Returns the failure instead of raising it, because the caller may have stopped
        waiting."""
        try:
            await self._ask(replica, replica.load(adapter))
        except Exception as error:  # logged, and returned to the caller
            if not isinstance(error, httpx.TransportError):  # `_ask` has logged transport errors
                logger.warning("vLLM at %s has not loaded adapter %s: %s", replica.addresses.admin, adapter.name, error)
            if isinstance(error, NoAnswer) and replica.state is not ReplicaState.READY:
                replica.wanted.add(adapter)
            return error
        return None

    async def retire(self, adapters: Sequence[AdapterVersion]) -> set[AdapterVersion]:
        """Unload adapters on all replicas. Returns the adapters that no replica reads any more: only their files may be
        deleted. vLLM reads an evicted adapter's files again, and dies for all tenants if they are gone. A replica whose
        host has copies of the files reads those; then all adapters are returned.

        A replica that does not answer may come back with its adapters loaded. So their files are kept until the replica
        answers, refuses connections, or is removed. This call ends after `grace_s` seconds. A slower replica goes on
        unloading in the background, and a later call returns the adapters that it has unloaded.
        """
        self._deadly.difference_update(adapters)
        unloading = [replica.retire(adapters) for replica in self.replicas]
        if unloading:
            ended, _ = await asyncio.wait(unloading, timeout=self._grace_s)
            for task in ended:
                if not task.cancelled():
                    task.result()
        return {adapter for adapter in adapters if not any(replica.may_read(adapter) for replica in self.replicas)}

    async def sleep(self) -> None:
        """Free the device memory of all ready replicas. Raises VllmError when a replica refuses, httpx.TransportError
        when no replica answers."""
        await self._on_ready(lambda replica: replica.sleep())

    async def wake(self) -> None:
        """Give all ready replicas their device memory back; nothing changes for an awake replica. Raises as `sleep`."""
        await self._on_ready(lambda replica: replica.wake())

    async def _on_ready(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        calls = (self._ask(replica, call(replica)) for replica in self._ready_replicas())
        _raise_failure(await asyncio.gather(*calls, return_exceptions=True))

    async def _ask(self, replica: Replica, call: Awaitable[None]) -> None:
        """Wait for a call to a ready replica. If the replica answers neither the call nor `/health`, it is lost."""
        try:
            await call
        except httpx.TransportError as error:
            logger.warning("%s", str(error) or type(error).__name__)
            if replica.state is ReplicaState.READY and not await replica.is_healthy():
                self._lose(replica, f"lost ({str(error) or type(error).__name__})")
            raise

    def _ready_replicas(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is ReplicaState.READY]

    def _watch_in_background(self, replica: Replica) -> None:
        if self._tasks is not None and replica.state is not ReplicaState.DRAINING:
            self._watches[replica.id] = self._tasks.create_task(self._watch(replica))

    async def _watch(self, replica: Replica) -> None:
        while True:
            while not await replica.is_healthy():  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(self._starting_interval_s)
            self._set(replica, ReplicaState.WARMING)
            try:
                await self._prepare(replica)
            except (VllmError, httpx.TransportError) as error:
                self._set(replica, ReplicaState.LOST, f"warm-up failed: {str(error) or type(error).__name__}")
                await asyncio.sleep(self._watching_interval_s)
                continue
            self._set(replica, ReplicaState.READY)
            await self._until_lost(replica)

    async def _prepare(self, replica: Replica) -> None:
        """Warm the replica up, and load the adapters in use, or the full weights. A sleeping replica is warm already,
        and is woken later."""
        if replica.incarnation is None:
            replica.forget_adapters()
        if self._weights is not None:
            await self._weights.bring(replica)
            await replica.warm_up()
            while not self._weights.is_on(replica):
                await self._weights.bring(replica)
            return
        if await replica.is_sleeping():
            return
        await replica.warm_up()
        try:
            in_use = await self._in_use()
        except Exception:  # no error of a callback may end the watch over the servers
            logger.exception("the adapters in use could not be read; they are loaded when a sample asks for them")
            in_use = []
        ordered = [adapter for adapter in in_use if adapter not in replica.adapters | self._deadly]
        replica.wanted.update(ordered)
        while replica.wanted:
            adapter = next((a for a in ordered if a in replica.wanted), None) or next(iter(replica.wanted))
            await self._catch_up(replica, adapter)

    async def _catch_up(self, replica: Replica, adapter: AdapterVersion) -> None:
        """Load one adapter before the replica is ready. If that fails, the first sample that asks for the adapter loads
        it, so that a bad adapter does not keep the replica from getting ready. Raises httpx.TransportError when the
        replica has died."""
        try:
            await replica.load(adapter)
        except (VllmError, AdapterMissing) as error:
            logger.warning("adapter %s was not loaded before vLLM is used: %s", adapter.name, error)
        except AdapterUnavailable as error:
            logger.warning("adapter %s was not loaded before vLLM is used: %s (%s)", adapter.name, error, error.reason)
        except httpx.TransportError as error:
            logger.warning("adapter %s was not loaded before vLLM is used: %s", adapter.name, error)
            if not await replica.is_healthy():
                self._deadly.add(adapter)
                raise

    async def _until_lost(self, replica: Replica) -> None:
        failed, incarnation = 0, replica.incarnation
        while failed < self._failures:
            # Probe again soon after a failure, to find a dead server within a second. Each probe has its own timeout.
            if await replica.lost_within(self._starting_interval_s if failed else self._watching_interval_s):
                return
            if not await replica.is_healthy():
                failed += 1
            elif replica.incarnation != incarnation:
                self._set(replica, ReplicaState.LOST, "started again")
                return
            else:
                failed = 0
        self._set(replica, ReplicaState.LOST, f"not healthy ({self._failures} probes in a row)")

    def _lose(self, replica: Replica, trouble: str) -> None:
        """Set a ready replica to lost. A replica in another state, such as `DRAINING`, keeps its state."""
        if replica.state is ReplicaState.READY:
            self._set(replica, ReplicaState.LOST, trouble)

    def _set(self, replica: Replica, state: ReplicaState, trouble: str = "") -> None:
        replica.set_state(state, trouble)
        logger.info("vLLM at %s: %s", replica.addresses.admin, trouble or state)
        self._changed.set()

    async def _publish_changes(self) -> None:
        """Publish changes one at a time, in order; `close` publishes the last change. Without a change, look again
        every `watching_interval_s`: the publisher or the router may have failed. Not after each probe: each look asks
        the router about all replicas, so the work would grow with the square of their number."""
        while not self._closing.is_set():
            await set_within(self._changed, self._watching_interval_s)
            self._changed.clear()
            if not self._closing.is_set():
                await self._tell_members()
                await self._publish()

    async def _tell_members(self) -> None:
        """Tell the proxy which replicas it may use. A failure is logged and retried.

        Replicas that start or warm up keep their places: after a restart of the engine alone, they may be in use. A
        ready replica keeps its place, too, while its last probe is unanswered: the proxy may have found that it hangs.
        """
        if self._members is None:
            return
        out = (ReplicaState.DRAINING, ReplicaState.LOST)
        fresh = time.monotonic() - 2 * self._watching_interval_s
        used = {replica.addresses.data for replica in self._ready_replicas() if replica.answered_at >= fresh}
        running = {replica.addresses.data for replica in self.replicas} if self._has_all else None
        left_out = {replica.addresses.data for replica in self.replicas if replica.state in out}
        try:
            await self._members.update(used, left_out - used, running)
        except NotTold as error:
            logger.warning("the replicas in use are not told yet: %s", error)
        else:
            self._members_told = self._members_told or bool(used)

    async def _publish(self, *, always: bool = False) -> None:
        """Publish the URL if it differs from the last published URL. A failure is logged and retried.

        Before the first URL nothing is withdrawn: after a restart of the engine alone, the URL published by the
        previous engine is still correct, and samples go on. A proxy's URL is published once the proxy has a replica.
        """
        if not self._members_told and not always:
            return
        url = (self._proxy_url or self.replicas[0].addresses.data) if self.ready else None
        if url == self._published and not always:
            return
        try:
            await self._publisher(url)
        except Exception:  # no error of a callback may end the watch over the servers
            logger.exception("the inference URL %s could not be published", url)
        else:
            self._published = url


def _raise_failure(outcomes: Sequence[BaseException | None]) -> None:
    """Raise the first refusal by a replica. If no replica has answered, raise the first failure."""
    failures = [outcome for outcome in outcomes if outcome is not None]
    for failure in failures:
        if not isinstance(failure, httpx.TransportError):
            raise failure
    if failures and len(failures) == len(outcomes):
        raise failures[0]
