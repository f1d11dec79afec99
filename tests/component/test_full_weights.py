"""Which version of the full weights replicas have, and when they may be used. Each scripted server is a vLLM and its
sidecar in one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_harness import until
from fake_upstream import COMPLETIONS, FakeUpstream, Received, fake_upstream, hang_up, reply
from replicas import WELL, group_of, replica_at, running

from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.full_weights import FullWeightsOfReplicas, NotPublished, VersionFiles
from skyrl.inference.replica import ReplicaState
from skyrl.vllm_plugin.incarnation import HEADER

ONE, TWO, BASE = (VersionFiles(name, Path(f"/files/{name}")) for name in ("m@1", "m@2", "default"))
UPDATE, PAUSE, CONTINUE = "/update_weights_from_disk", "/pause_generation", "/continue_generation"


@dataclass
class Server:
    """Has the weights `version`. `calls` are the changes that it was asked for, in order."""

    upstream: FakeUpstream
    version: str = "default"
    starts: int = 1
    staged: str | None = None
    paused: bool = False
    refuses: str = ""
    """Files with this word in their directory are refused when they are read."""
    dies_applying: bool = False
    dead: bool = False
    waits: asyncio.Event | None = None
    """Reading takes until this is set."""
    calls: list[str] = field(default_factory=list)
    warmed_with: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in ("/health", "/is_sleeping", COMPLETIONS, "/model_info", UPDATE, PAUSE, CONTINUE):
            self.upstream.controls[path] = self._answer

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        answer = hang_up if self.dead else await self._reply(request)
        await (hang_up if self.dead else answer)(request, writer)

    async def _reply(self, request: Received):
        match request.path:
            case "/health":
                return reply(200, b"", **{HEADER.replace("-", "_"): f"start {self.starts}"})
            case "/model_info":
                return reply(200, {"weight_version": self.version})
            case "/pause_generation":
                self.calls.append(f"pause {request.json['mode']}")
                self.paused = True
            case "/continue_generation":
                self.calls.append("continue")
                self.paused = False
            case "/update_weights_from_disk":
                return await self._update(request)
            case _ if request.path == COMPLETIONS:
                self.warmed_with.append(self.version)
        return WELL if request.path != "/is_sleeping" else reply(200, {"is_sleeping": self.paused})

    async def _update(self, request: Received):
        version, directory = request.json["weight_version"], request.json["model_path"]
        assert request.json["flush_cache"] is False
        if request.json.get("stage_only"):
            self.calls.append(f"stage {version}")
            if self.waits is not None:
                await self.waits.wait()
            if self.refuses and self.refuses in directory:
                return reply(400, {"success": False, "message": f"{directory} is not finite"})
            self.staged = version
            return reply(200, {"success": True})
        self.calls.append(f"apply {version}")
        assert self.paused, "samples are paused while the weights change"
        assert self.staged == version
        if self.dies_applying:
            self.dead = True
        self.version = version
        return reply(200, {"success": True})

    def restart(self) -> None:
        self.starts, self.version, self.staged, self.paused, self.dead = self.starts + 1, "default", None, False, False
        self.dies_applying = False


@asynccontextmanager
async def group_with(
    count: int, first: VersionFiles = BASE
) -> AsyncIterator[tuple[EngineGroup, list[Server], list[str | None]]]:
    async def wanted() -> VersionFiles:
        return first

    async with AsyncExitStack() as stack:
        found = [Server(await stack.enter_async_context(fake_upstream())) for _ in range(count)]
        urls = [server.upstream.url for server in found]
        weights = FullWeightsOfReplicas(wanted, {url: url for url in urls}, "key")
        group, published = group_of(
            *map(replica_at, urls), proxy_url="http://127.0.0.1:9" if count > 1 else None, weights=weights
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
    async with group_with(1, ONE) as (group, (server,), _):
        server.version, server.paused = "m@1", True
        async with running(group):
            await until(lambda: all_ready(group))
            assert (server.calls, server.paused) == (["continue"], False)


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
        assert states(group)[1] is ReplicaState.LOST
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
        assert (server.version, states(group)) == ("m@1", [ReplicaState.LOST])
        server.refuses = ""
        await until(lambda: all_ready(group))
        assert server.version == "default"
        server.calls.clear()
        await group.want_weights(BASE)
        assert server.calls == []
        assert published[-1] == server.upstream.url
