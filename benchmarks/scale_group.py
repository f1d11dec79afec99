"""The engine's view of many replicas: EngineGroup, the real router, and fake replicas in one process.

Measures how long publications and sweeps take, what watching costs, and how soon a death is known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import httpx
import uvloop

from benchmarks.fake_workers import FakeWorkers, fake_workers
from benchmarks.processes import cpu_seconds
from benchmarks.scale_router import RunningRouter, server_router
from benchmarks.series import quantile
from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import Addresses, Replica, ReplicaState
from skyrl.inference.router_members import RouterMembers

SWEPT = 64
"""Adapters of one sweep."""
MOST_SWEEPS = 30
QUIET_S = 0.2
SPREAD_S = 1.0
"""Replicas become ready one after another, so their probes are spread."""
UNLOAD = "/v1/unload_lora_adapter"
LAG_S = 0.01


class AdapterDirectories:
    """An AdapterHost that has the files of every adapter."""

    copies = False

    async def bring(self, adapter: AdapterVersion) -> str:
        return f"/adapters/{adapter.name}"


class CountedMembers(RouterMembers):
    """Counts how often the router is asked which workers it uses."""

    updates = 0

    async def update(
        self, used: Collection[str], left_out: Collection[str], running: Collection[str] | None = None
    ) -> None:
        self.updates += 1
        await super().update(used, left_out, running)


def group(replicas: int, seconds: float) -> dict[str, Any]:
    with fake_workers(replicas, SPREAD_S) as fakes, server_router() as router:
        return {"replicas": replicas} | uvloop.run(_group(router, fakes, seconds))


async def _group(router: RunningRouter, fakes: FakeWorkers, seconds: float) -> dict[str, Any]:
    members = CountedMembers(router.url, router.key)

    async def publish(url: str | None) -> None: ...

    async def in_use() -> Sequence[AdapterVersion]:
        return [AdapterVersion(f"model-{number}@1") for number in range(8)]

    replicas = [Replica(url, Addresses.same(url), router.key, AdapterDirectories()) for url in fakes.urls]
    watched = EngineGroup(replicas, publish, in_use, proxy_url=router.url, members=members)
    began = time.perf_counter()
    running = asyncio.create_task(watched.run())
    try:
        await _until(lambda: all(replica.state is ReplicaState.READY for replica in replicas))
        ready = time.perf_counter() - began
        async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {router.key}"}) as client:
            await _until_routed(client, router, fakes.urls)
            routed = time.perf_counter() - began
            watching = await _watching(router, fakes, members, seconds)
            published = [await _timed(watched.publish_adapter(adapter)) for adapter in _adapters(20)]
            swept = [await _timed(watched.retire([adapter])) for adapter in _adapters(20)]
            for adapter in _adapters(SWEPT):
                await watched.publish_adapter(adapter)
            sweep = await _sweep(fakes, watched)
            dead = await _death(client, router, fakes, watched) if len(fakes.urls) > 1 else {}
    finally:
        await watched.close()
        await running
    return {
        "ready_s": ready,
        "routed_s": routed,
        "publish_ms": quantile(published, 0.5) * 1e3,
        "retire_ms": quantile(swept, 0.5) * 1e3,
        **sweep,
        **watching,
        **dead,
    }


def _adapters(count: int) -> list[AdapterVersion]:
    return [AdapterVersion(f"swept-{number}@1") for number in range(count)]


async def _timed(call: Awaitable[object]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


async def _sweep(fakes: FakeWorkers, watched: EngineGroup) -> dict[str, float]:
    """Unload SWEPT adapters from all replicas as the engine's sweeps do: each call of `retire` has the adapters that no
    call has freed yet. The engine waits 10 s between two sweeps; this waits until the replicas get no more requests."""
    asked, calls, left = fakes.order()[UNLOAD], 0, set(_adapters(SWEPT))
    while left and calls < MOST_SWEEPS:
        left -= await watched.retire(list(left))
        calls += 1
        before = -1
        while before != (now := fakes.order()[UNLOAD]):
            before = now
            await asyncio.sleep(QUIET_S)
    return {
        "sweep_calls": calls,
        "sweep_unfreed": len(left),
        "sweep_unloads": fakes.order()[UNLOAD] - asked,
    }


async def _watching(
    router: RunningRouter, fakes: FakeWorkers, members: CountedMembers, seconds: float
) -> dict[str, float]:
    """The cost of watching alone. This process does nothing else, so its CPU is the group's."""
    lag = asyncio.create_task(_lag(seconds))
    probes, asked = fakes.order()["/health"], members.updates
    own, theirs, began = time.process_time(), cpu_seconds(router.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    wall = time.perf_counter() - began
    own, theirs = time.process_time() - own, cpu_seconds(router.pid) - theirs
    lags = await lag
    return {
        "group_cores": own / wall,
        "router_cores": theirs / wall,
        "probes_per_s": (fakes.order()["/health"] - probes) / wall,
        "told_per_s": (members.updates - asked) / wall,
        "loop_lag_p99_ms": quantile(lags, 0.99) * 1e3,
    }


async def _lag(seconds: float) -> list[float]:
    """How much later than asked a timer of this event loop fires."""
    end, late = time.perf_counter() + seconds, []
    while (began := time.perf_counter()) < end:
        await asyncio.sleep(LAG_S)
        late.append(time.perf_counter() - began - LAG_S)
    return late


async def _death(
    client: httpx.AsyncClient, router: RunningRouter, fakes: FakeWorkers, watched: EngineGroup
) -> dict[str, float]:
    """A worker refuses connections: seconds until the router leaves it out, and until the group takes it for lost; then
    it comes back: seconds until it is used again."""
    replica, others = watched.replicas[-1], fakes.urls[:-1]
    began = time.perf_counter()
    fakes.order(f"kill={len(others)}")
    await _until_routed(client, router, others)
    left_out = time.perf_counter() - began
    await _until(lambda: replica.state is ReplicaState.LOST)
    lost = time.perf_counter() - began
    began = time.perf_counter()
    fakes.order(f"revive={len(others)}")
    await _until_routed(client, router, fakes.urls)
    return {"left_out_s": left_out, "lost_s": lost, "back_s": time.perf_counter() - began}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - other tasks and sockets set no event
            await asyncio.sleep(0.005)


async def _until_routed(client: httpx.AsyncClient, router: RunningRouter, urls: Collection[str]) -> None:
    """Until the router uses these workers and no other."""
    async with asyncio.timeout(120):
        while True:
            workers = (await client.get(f"{router.url}/statusz")).json()["workers"]
            if {worker["url"] for worker in workers if worker["state"] == "healthy"} == set(urls):
                return
            await asyncio.sleep(0.02)
