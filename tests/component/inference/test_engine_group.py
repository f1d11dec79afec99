"""When the engine publishes and withdraws the inference URL, and which replicas get an adapter. The servers are
scripted: healthy, unhealthy or dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from engine_harness import until
from fake_upstream import LOAD, FakeUpstream, Received, Reply, closed_port, error, fake_upstream, hang_up
from replicas import GONE, ILL, SOON_S, UNLOAD, WELL, group_of, replica_at, running, set_replies

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import ReplicaState
from skyrl.inference.vllm_client import VllmError

PROXY = "http://127.0.0.1:9"


async def nothing_in_use() -> list[AdapterVersion]:
    return []


@pytest.mark.parametrize("health", [ILL, GONE], ids=["its engine is dead", "no listener"])
async def test_the_url_is_withdrawn_at_a_death_and_published_for_the_next_server(health: Reply) -> None:
    async with fake_upstream() as upstream:
        set_replies(upstream)
        group, published = group_of(upstream.url)
        async with running(group):
            await until(lambda: published == [upstream.url])
            assert group.ready
            warm_ups = len(upstream.completions)
            set_replies(upstream, health)
            await until(lambda: published == [upstream.url, None])
            assert "not healthy" in group.reason
            set_replies(upstream)
            await until(lambda: published == [upstream.url, None, upstream.url])
            assert len(upstream.completions) == 2 * warm_ups, "the second server was warmed up, too"
        assert published == [upstream.url, None, upstream.url, None]


@asynccontextmanager
async def two_replicas() -> AsyncIterator[tuple[FakeUpstream, FakeUpstream]]:
    async with fake_upstream() as one, fake_upstream() as two:
        set_replies(one)
        set_replies(two)
        yield one, two


def adapters_named_in(upstream: FakeUpstream, path: str) -> list[str]:
    """The adapters named in requests for this path."""
    return [request.json["lora_name"] for request in upstream.requests if request.path == path]


def state_of(group: EngineGroup, upstream: FakeUpstream) -> ReplicaState:
    return next(replica.state for replica in group.replicas if replica.addresses.admin == upstream.url)


async def test_the_url_of_two_replicas_is_published_while_one_is_ready() -> None:
    async with two_replicas() as (one, two):
        set_replies(one, ILL)
        set_replies(two, ILL)
        group, published = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: bool(two.requests))
            assert group.reason == f"vLLM at {one.url}: starting; vLLM at {two.url}: starting"
            assert published == []
            set_replies(two)
            await until(lambda: published == [PROXY])
            assert group.reason == ""
            set_replies(one)
            await until(lambda: state_of(group, one) is ReplicaState.READY)
            set_replies(two, GONE)
            await until(lambda: state_of(group, two) is ReplicaState.LOST)
            assert group.ready
            set_replies(one, GONE)
            await until(lambda: published == [PROXY, None])
            assert one.url in group.reason
            assert two.url in group.reason
            set_replies(one)
            await until(lambda: published == [PROXY, None, PROXY])
        assert published[-1] is None


def test_two_replicas_need_a_proxy() -> None:
    with pytest.raises(ValueError, match="2 replicas need a proxy_url"):
        group_of("http://127.0.0.1:1", "http://127.0.0.1:2")


async def test_an_adapter_is_loaded_on_every_replica_that_is_ready() -> None:
    async with two_replicas() as (one, two):
        group, published = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: all(state_of(group, each) is ReplicaState.READY for each in (one, two)))
            await group.publish_adapter(AdapterVersion("first"))
            set_replies(two, ILL)
            await until(lambda: state_of(group, two) is ReplicaState.LOST)
            await group.publish_adapter(AdapterVersion("second"))
            assert adapters_named_in(one, LOAD) == ["first", "second"]
            assert adapters_named_in(two, LOAD) == ["first"], "a lost replica gets no load call"
            assert published == [PROXY]


async def test_an_adapter_that_one_replica_refuses_is_not_used() -> None:
    async with two_replicas() as (one, two):
        group, _ = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: all(state_of(group, each) is ReplicaState.READY for each in (one, two)))
            two.controls[LOAD] = error(400, "its rank is above the server's")
            with pytest.raises(VllmError, match="its rank is above the server's"):
                await group.publish_adapter(AdapterVersion("large"))
            assert adapters_named_in(one, LOAD) == ["large"]


async def test_an_adapter_is_unloaded_from_every_replica_whether_ready_or_not() -> None:
    async with two_replicas() as (one, two):
        group, published = group_of(one.url, two.url, closed_port(), proxy_url=PROXY)
        async with running(group):
            set_replies(two, ILL)
            await until(lambda: state_of(group, one) is ReplicaState.READY)
            old, unknown, stuck = AdapterVersion("old"), AdapterVersion("unknown"), AdapterVersion("stuck")
            assert await group.retire([old]) == {old}, "the third has no listener, so it has no adapter loaded"
            assert adapters_named_in(one, UNLOAD) == adapters_named_in(two, UNLOAD) == ["old"]
            two.controls[UNLOAD] = error(404, "no such adapter")
            assert await group.retire([unknown]) == {unknown}
            two.controls[UNLOAD] = error(500, "cannot")
            assert await group.retire([stuck]) == set()
            assert published == [PROXY]


async def test_a_replica_that_breaks_the_connection_may_still_have_the_adapter() -> None:
    async with two_replicas() as (one, two):
        group, published = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: published == [PROXY])
            two.controls[UNLOAD] = hang_up
            assert await group.retire([AdapterVersion("old"), AdapterVersion("older")]) == set()
            assert adapters_named_in(one, UNLOAD) == ["old", "older"]
            assert adapters_named_in(two, UNLOAD) == ["old"], (
                "after one call without an answer the group makes no second one"
            )


async def test_a_slow_publisher_delays_no_health_check_and_gets_the_last_state() -> None:
    """A publication may wait for the database's lock. Meanwhile servers die and come back."""
    published: list[str | None] = []
    may_go, probes = asyncio.Event(), 0

    async def publish(url: str | None) -> None:
        await may_go.wait()
        published.append(url)

    async def count(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal probes
        probes += 1
        await WELL(request, writer)

    async with fake_upstream() as upstream:
        set_replies(upstream, count)
        group = EngineGroup(
            [replica_at(upstream.url)],
            publish,
            nothing_in_use,
            starting_interval_s=SOON_S,
            watching_interval_s=SOON_S,
            failures=1,
        )
        async with running(group):
            await until(lambda: group.ready)
            before = probes
            await until(lambda: probes > before + 3)
            set_replies(upstream, ILL)
            await until(lambda: not group.ready)
            assert published == []
            may_go.set()
            await until(lambda: published == [upstream.url, None])


async def test_a_failed_publication_is_tried_again() -> None:
    published: list[str | None] = []
    failures = iter([OSError("no route"), RuntimeError("not now")])

    async def publish(url: str | None) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        published.append(url)

    async with fake_upstream() as upstream:
        set_replies(upstream)
        group = EngineGroup(
            [replica_at(upstream.url)],
            publish,
            nothing_in_use,
            starting_interval_s=SOON_S,
            watching_interval_s=SOON_S,
        )
        async with running(group):
            await until(lambda: published == [upstream.url])
