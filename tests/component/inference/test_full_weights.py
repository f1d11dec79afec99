"""Which version of the full weights replicas have, and when they may be used. Each scripted server is a vLLM and its
sidecar in one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from engine_harness import until
from fake_upstream import fake_upstream
from full_servers import BASE, ONE, TWO, Server
from replicas import group_of, replica_at, running

from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.full_weights import FullWeightsOfReplicas, NotPublished, VersionFiles
from skyrl.inference.replica import ReplicaState


@asynccontextmanager
async def group_with(
    count: int, first: VersionFiles = BASE
) -> AsyncIterator[tuple[EngineGroup, list[Server], list[str | None]]]:
    async def wanted() -> VersionFiles:
        return first

    async with AsyncExitStack() as stack:
        found = [Server(await stack.enter_async_context(fake_upstream())) for _ in range(count)]
        urls = [server.upstream.url for server in found]
        weights = FullWeightsOfReplicas(wanted, "key")
        group, published = group_of(
            *(replica_at(url, sidecar=url) for url in urls),
            proxy_url="http://127.0.0.1:9" if count > 1 else None,
            weights=weights,
        )
        yield group, found, published


def states(group: EngineGroup) -> list[ReplicaState]:
    return [replica.state for replica in group.replicas]


def all_ready(group: EngineGroup) -> bool:
    return set(states(group)) == {ReplicaState.READY}


def versions(servers: Sequence[Server]) -> list[str]:
    return [server.version for server in servers]


async def test_a_replica_has_the_wanted_version_before_it_is_warmed_up_and_used() -> None:
    async with group_with(1, ONE) as (group, (server,), published), running(group):
        await until(lambda: published == [server.upstream.url])
        assert server.calls == ["stage m@1", "pause in_place", "apply m@1", "continue"]
        assert set(server.warmed_with) == {"m@1"}
        server.restart()
        await until(lambda: published == [server.upstream.url, None, server.upstream.url])
        assert server.version == "m@1"
        assert set(server.warmed_with) == {"m@1"}


async def test_a_replica_that_an_engine_has_left_paused_is_continued_and_not_updated() -> None:
    async with group_with(1) as (group, (server,), _):
        server.paused = True
        async with running(group):
            await until(lambda: all_ready(group))
            assert (server.calls, server.paused) == (["continue"], False)


async def test_a_replica_that_has_a_version_from_an_earlier_engine_gets_it_once_more() -> None:
    """That engine may have died before it recorded the version, and the repeated save may have written other files."""
    async with group_with(1, ONE) as (group, (server,), _):
        server.version = "m@1"
        async with running(group):
            await until(lambda: all_ready(group))
            assert server.calls == ["stage m@1", "pause in_place", "apply m@1", "continue"]
            server.calls.clear()
            group.replicas[0].set_state(ReplicaState.LOST, "by the test")
            await until(lambda: all_ready(group))
            assert server.calls == ["continue"], "this engine knows which files it has given"


async def test_a_version_is_read_by_all_replicas_before_one_changes() -> None:
    async with group_with(2) as (group, servers, _), running(group):
        await until(lambda: all_ready(group))
        for server in servers:
            server.calls.clear()
        servers[0].waits = asyncio.Event()
        publishing = asyncio.create_task(group.publish_weights(ONE))
        await until(lambda: all(server.calls == ["stage m@1"] for server in servers))
        assert versions(servers) == ["default", "default"]
        servers[0].waits.set()
        await publishing
        assert versions(servers) == ["m@1", "m@1"]
        assert all(server.calls == ["stage m@1", "pause in_place", "apply m@1", "continue"] for server in servers)
        assert all_ready(group)


async def test_a_version_that_all_replicas_refuse_is_not_published() -> None:
    async with group_with(2, ONE) as (group, servers, _), running(group):
        await until(lambda: all_ready(group))
        for server in servers:
            server.refuses = "m@2"
        with pytest.raises(NotPublished, match="m@2 is not finite"):
            await group.publish_weights(TWO)
        assert (versions(servers), all_ready(group)) == (["m@1", "m@1"], True)
        servers[0].restart()
        await until(lambda: servers[0].version == "m@1")
        assert "apply m@2" not in servers[0].calls


async def test_a_replica_that_refuses_a_version_which_another_takes_is_out_until_it_takes_it() -> None:
    async with group_with(2) as (group, servers, _), running(group):
        await until(lambda: all_ready(group))
        servers[1].refuses = "m@1"
        await group.publish_weights(ONE)
        assert versions(servers) == ["m@1", "default"]
        await until(lambda: states(group)[1] is ReplicaState.LOST)  # between two tries; during one it is warming up
        await until(lambda: servers[1].calls.count("stage m@1") > 2)
        assert states(group)[0] is ReplicaState.READY
        servers[1].refuses = ""
        await until(lambda: all_ready(group))
        assert versions(servers) == ["m@1", "m@1"]


async def test_a_replica_that_dies_in_an_update_comes_back_with_the_new_version() -> None:
    async with group_with(2) as (group, servers, _), running(group):
        await until(lambda: all_ready(group))
        servers[1].dies_applying = True
        await group.publish_weights(ONE)
        assert servers[0].version == "m@1"
        assert states(group)[1] is ReplicaState.LOST
        servers[1].restart()
        await until(lambda: all_ready(group))
        assert versions(servers) == ["m@1", "m@1"]
        assert "default" not in servers[1].warmed_with[4:], "no request reached it with other weights"


async def test_a_replica_that_starts_during_a_publication_gets_the_new_version() -> None:
    async with group_with(2) as (group, servers, _):
        servers[1].dead = True
        async with running(group):
            await until(lambda: states(group)[0] is ReplicaState.READY)
            servers[0].waits = asyncio.Event()
            publishing = asyncio.create_task(group.publish_weights(ONE))
            await until(lambda: servers[0].calls[-1] == "stage m@1")
            servers[1].dead = False
            await until(lambda: all_ready(group))
            assert servers[1].version == "default", "it is not wanted yet"
            servers[0].waits.set()
            await publishing
            await until(lambda: all_ready(group) and versions(servers) == ["m@1", "m@1"])


async def test_a_version_is_wanted_although_no_replica_is_there() -> None:
    async with group_with(1) as (group, (server,), published):
        server.dead = True
        async with running(group):
            await group.publish_weights(ONE)
            server.dead = False
            await until(lambda: published == [server.upstream.url])
            assert server.version == "m@1"


async def test_weights_that_must_come_back_are_tried_until_a_replica_takes_them() -> None:
    async with group_with(1, ONE) as (group, (server,), published), running(group):
        await until(lambda: all_ready(group))
        server.refuses = "default"
        await group.want_weights(BASE)
        await until(lambda: states(group) == [ReplicaState.LOST])  # between two tries; during one it is warming up
        assert server.version == "m@1"
        server.refuses = ""
        await until(lambda: all_ready(group))
        assert server.version == "default"
        server.calls.clear()
        await group.want_weights(BASE)
        assert server.calls == []
        assert published[-1] == server.upstream.url
