"""When the inference URL is published and withdrawn, and which replicas get an adapter: scripted servers that are well,
ill or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from adapter_hosts import AllThere
from engine_harness import until
from fake_upstream import LOAD, FakeUpstream, Received, Reply, closed_port, error, fake_upstream, hang_up
from replicas import GONE, ILL, SOON_S, UNLOAD, WELL, group_of, set_up

from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.vllm_client import VllmError
from skyrl.types.weights import AdapterVersion

PROXY = "http://127.0.0.1:9"


@asynccontextmanager
async def running(group: EngineGroup) -> AsyncIterator[None]:
    watching = asyncio.create_task(group.run())
    yield
    await group.close()
    await watching


@pytest.mark.parametrize("health", [ILL, GONE], ids=["its engine is dead", "nobody answers"])
async def test_death_is_published_and_so_is_the_next_server(health: Reply) -> None:
    async with fake_upstream() as upstream:
        set_up(upstream)
        group, published = group_of(upstream.url)
        async with running(group):
            await until(lambda: published == [upstream.url])
            assert group.ready
            warm_ups = len(upstream.completions)
            set_up(upstream, health)
            await until(lambda: published == [upstream.url, None])
            assert "not healthy" in group.reason
            set_up(upstream)
            await until(lambda: published == [upstream.url, None, upstream.url])
            assert len(upstream.completions) == 2 * warm_ups, "the next one was warmed up, too"
        assert published == [upstream.url, None, upstream.url, None]


@asynccontextmanager
async def two_replicas() -> AsyncIterator[tuple[FakeUpstream, FakeUpstream]]:
    async with fake_upstream() as one, fake_upstream() as two:
        set_up(one)
        set_up(two)
        yield one, two


def asked_for(upstream: FakeUpstream, path: str) -> list[str]:
    """The adapters named in requests for this path."""
    return [request.json["lora_name"] for request in upstream.requests if request.path == path]


async def test_two_replicas_are_published_while_both_are_ready() -> None:
    async with two_replicas() as (one, two):
        set_up(two, ILL)
        group, published = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: group.reason == f"vLLM at {two.url}: starting")
            assert published == []
            set_up(two)
            await until(lambda: published == [PROXY])
            set_up(one, GONE)
            await until(lambda: published == [PROXY, None])
            assert one.url in group.reason
            assert two.url not in group.reason
            set_up(one)
            await until(lambda: published == [PROXY, None, PROXY])
        assert published[-1] is None


def test_two_replicas_need_a_proxy() -> None:
    with pytest.raises(ValueError, match="2 replicas need a proxy_url"):
        group_of("http://127.0.0.1:1", "http://127.0.0.1:2")


async def test_an_adapter_is_loaded_on_every_replica_that_is_ready() -> None:
    async with two_replicas() as (one, two):
        group, published = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: published == [PROXY])
            await group.publish_adapter(AdapterVersion("first"))
            set_up(two, ILL)
            await until(lambda: not group.ready)
            await group.publish_adapter(AdapterVersion("second"))
            assert asked_for(one, LOAD) == ["first", "second"]
            assert asked_for(two, LOAD) == ["first"], "it loads the second one when a sample asks for it"


async def test_an_adapter_that_one_replica_refuses_is_not_to_be_used() -> None:
    async with two_replicas() as (one, two):
        group, published = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: published == [PROXY])
            two.controls[LOAD] = error(400, "its rank is above the server's")
            with pytest.raises(VllmError, match="its rank is above the server's"):
                await group.publish_adapter(AdapterVersion("large"))
            await until(lambda: asked_for(one, LOAD) == ["large"])


async def test_an_adapter_is_unloaded_from_every_replica_ready_or_not() -> None:
    async with two_replicas() as (one, two):
        group, published = group_of(one.url, two.url, closed_port(), proxy_url=PROXY)
        async with running(group):
            set_up(two, ILL)
            await until(lambda: f"vLLM at {two.url}: starting; " in group.reason and one.url not in group.reason)
            await group.retire_adapter("old")  # nothing listens at the third: it has nothing loaded
            assert asked_for(one, UNLOAD) == asked_for(two, UNLOAD) == ["old"]
            two.controls[UNLOAD] = error(404, "no such adapter")
            await group.retire_adapter("unknown")
            two.controls[UNLOAD] = error(500, "cannot")
            with pytest.raises(VllmError, match="cannot"):
                await group.retire_adapter("stuck")
            assert published == []


async def test_a_replica_that_breaks_off_may_still_have_the_adapter() -> None:
    async with two_replicas() as (one, two):
        group, published = group_of(one.url, two.url, proxy_url=PROXY)
        async with running(group):
            await until(lambda: published == [PROXY])
            two.controls[UNLOAD] = hang_up
            with pytest.raises(Exception, match="disconnected"):
                await group.retire_adapter("old")


async def test_a_publisher_that_is_slow_holds_up_no_watch_and_is_told_the_last_state() -> None:
    """The database may wait for its lock: meanwhile servers die and come back."""
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
        set_up(upstream, count)
        group = EngineGroup(
            [upstream.url],
            "key",
            publish,
            AllThere(),
            starting_interval_s=SOON_S,
            watching_interval_s=SOON_S,
            failures=1,
        )
        async with running(group):
            await until(lambda: group.ready)
            before = probes
            await until(lambda: probes > before + 3)
            set_up(upstream, ILL)
            await until(lambda: not group.ready)
            assert published == []
            may_go.set()
            await until(lambda: published == [upstream.url, None])


async def test_a_publisher_that_fails_is_asked_again() -> None:
    published: list[str | None] = []
    failures = iter([OSError("no route"), RuntimeError("not now")])

    async def publish(url: str | None) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        published.append(url)

    async with fake_upstream() as upstream:
        set_up(upstream)
        group = EngineGroup(
            [upstream.url], "key", publish, AllThere(), starting_interval_s=SOON_S, watching_interval_s=SOON_S
        )
        async with running(group):
            await until(lambda: published == [upstream.url])
