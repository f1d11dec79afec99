"""The replicas follow the rows of the placement process. The router breaks off what was in flight at one that has
ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse
from replicas import Server, group_of, replica_at, running, servers
from test_router_members import KEY, ROUTER, until, used

from skyrl.api.served import EngineWatch
from skyrl.base.config.base_models import Modes
from skyrl.base.types.placed_server import PlacedServer
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.placed_replicas import PlacedReplicas
from skyrl.inference.router_members import RouterMembers
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState
from skyrl.storage.db.processes import follow_servers, read_servers, write_servers
from tests.component.router_world import RunningRouter, running_router
from tests.databases import make_tables

OWNER = "server-1"
SLOW = {**ROUTER, "health_check_interval_s": 600.0, "hang_s": 600.0}
"""A router that finds out nothing by itself."""
WAITS = "waits for 1 GPU: no node has 1 GPU: 10.0.0.1 has 0 of 1 GPU free"


def placed(number: int, server: Server | None, reason: str = "") -> PlacedServer:
    url = None if server is None else server.url
    return PlacedServer(f"vllm-{number}", "vllm", url, None if server is None else "10.0.0.1", None, reason)


@contextmanager
def rows(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(f"sqlite:///{tmp_path / 'db'}")) as database:
        make_tables(database)
        yield database


@asynccontextmanager
async def following_rows(database: Database, replicas: PlacedReplicas) -> AsyncIterator[asyncio.Event]:
    """The event says that the rows have changed."""
    rung = asyncio.Event()
    task = asyncio.create_task(follow_servers(database, OWNER, rung, replicas.follow))
    try:
        yield rung
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def following(
    database: Database, router: RunningRouter, behind: list[Server]
) -> AsyncIterator[tuple[EngineGroup, asyncio.Event]]:
    """What an engine process runs of the replicas, and the event that says that the rows have changed."""
    group, _ = group_of(proxy_url=router.url, members=RouterMembers(router.url, KEY), has_all=False)
    by_url = {server.url: server for server in behind}
    replicas = PlacedReplicas(group, lambda at: by_url[at.data].replica(sidecar=at.sidecar))
    async with running(group), following_rows(database, replicas) as rung:
        yield group, rung


def workers(router: RunningRouter) -> list[dict[str, Any]]:
    return router.app.status()["workers"]  # type: ignore[return-value]


async def hanging_sample(router: RunningRouter, server: Server) -> asyncio.Task[ClientResponse]:
    """A request through the router that is in flight at a server which answers nothing."""
    server.hang()
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": [1], "model": "a"}
    asked = asyncio.create_task(router.session.post(f"{router.url}/v1/completions", json=body, headers=headers))
    await until(lambda: any(worker["in_flight"] for worker in workers(router)))
    return asked


async def assert_broken_off(asked: asyncio.Task[ClientResponse]) -> None:
    answer = await asyncio.wait_for(asked, 60)
    assert answer.status == 502
    assert (await answer.json())["error"]["code"] == "worker_interrupted"


async def test_replicas_come_go_and_move_with_the_rows(tmp_path: Path) -> None:
    with rows(tmp_path) as database:
        async with (
            servers(3) as behind,
            running_router(**ROUTER) as router,
            following(database, router, behind) as (group, rung),
        ):

            def write(*rows: PlacedServer) -> None:
                database.write(lambda c: write_servers(c, OWNER, rows))
                database.write(lambda c: write_servers(c, "another", [placed(9, behind[2])]))
                rung.set()

            write(placed(0, behind[0]), placed(1, None, WAITS))
            await until(lambda: used(router) == {behind[0].url})
            write(placed(0, behind[0]), placed(1, behind[1]))
            await until(lambda: used(router) == {behind[0].url, behind[1].url})
            write(placed(0, None, "was lost"), placed(1, behind[1]))
            await until(lambda: used(router) == {behind[1].url})
            assert [replica.id for replica in group.replicas] == [behind[1].url]
            write(placed(0, behind[0]), placed(1, behind[1]))
            await until(lambda: used(router) == {behind[0].url, behind[1].url})


async def test_a_server_whose_sidecar_has_moved_is_another_replica(tmp_path: Path) -> None:
    with closing(Database(f"sqlite:///{tmp_path / 'db'}")) as database:
        make_tables(database)
        async with (
            servers(1) as behind,
            running_router(**ROUTER) as router,
            following(database, router, behind) as (group, rung),
        ):
            for sidecar in (None, "http://10.0.0.1:12001", "http://10.0.0.1:12002"):
                row = replace(placed(0, behind[0]), sidecar_url=sidecar)
                database.write(lambda c, row=row: write_servers(c, OWNER, [row]))
                rung.set()
                await until(lambda at=sidecar: [each.addresses.sidecar for each in group.replicas] == [at])
                await until(lambda: used(router) == {behind[0].url})


async def test_requests_at_a_server_that_has_ended_are_broken_off_at_once(tmp_path: Path) -> None:
    with rows(tmp_path) as database:
        async with (
            servers(1) as behind,
            running_router(**SLOW) as router,
            following(database, router, behind) as (_, rung),
        ):
            database.write(lambda c: write_servers(c, OWNER, [placed(0, behind[0])]))
            rung.set()
            await until(lambda: used(router) == {behind[0].url})
            asked = await hanging_sample(router, behind[0])
            database.write(lambda c: write_servers(c, OWNER, [placed(0, None, "was lost")]))
            rung.set()
            await assert_broken_off(asked)
            await until(lambda: router.app.status()["workers"] == [])
            behind[0].restart()


async def test_requests_at_a_server_that_ended_while_no_engine_ran_are_broken_off_by_the_next_engine(
    tmp_path: Path,
) -> None:
    with rows(tmp_path) as database:
        async with servers(2) as behind, running_router(**SLOW) as router:
            database.write(lambda c: write_servers(c, OWNER, [placed(0, behind[0])]))
            async with following(database, router, behind):
                await until(lambda: used(router) == {behind[0].url})
                asked = await hanging_sample(router, behind[0])
            database.write(lambda c: write_servers(c, OWNER, [placed(0, behind[1])]))
            async with following(database, router, behind):
                await assert_broken_off(asked)
                await until(lambda: [worker["url"] for worker in workers(router)] == [behind[1].url])
            behind[0].restart()


async def test_no_server_counts_as_ended_before_the_rows_were_read(tmp_path: Path) -> None:
    class Recorded:
        def __init__(self) -> None:
            self.running: list[Collection[str] | None] = []

        async def update(
            self, used: Collection[str], left_out: Collection[str], running: Collection[str] | None = None
        ) -> None:
            self.running.append(running)

        async def close(self) -> None: ...

    members = Recorded()
    group, _ = group_of(proxy_url="http://router", members=members, has_all=False)
    with closing(Database(f"sqlite:///{tmp_path / 'db'}")) as database:
        replicas = PlacedReplicas(group, lambda at: replica_at(at.data))
        async with running(group), following_rows(database, replicas) as rung:
            await until(lambda: len(members.running) > 3)
            assert members.running == [None] * len(members.running), "the database has no tables yet"
            make_tables(database)
            rung.set()
            await until(lambda: members.running[-1] == set())


async def test_the_api_says_what_each_server_waits_for() -> None:
    state, rows = EngineState(training_ready=True), [placed(0, None, WAITS), PlacedServer("vllm-1", "vllm", "u", "n")]

    async def read() -> EngineState:
        return state

    async def read_rows() -> list[PlacedServer]:
        return rows

    watch = EngineWatch(read, Modes(trains=False, forwards=True, manages_inference=True), read_rows)
    urls = watch.server_urls
    await watch.refresh()
    assert watch.reasons() == [f"sampling: vllm-0 {WAITS}; vllm-1 starts on node n"]
    assert watch.missing_servers == [f"vllm-0 {WAITS}"]
    assert watch.why_away() == "vllm-0 waits for 1 GPU; vllm-1 starts", "no addresses for tenants"
    assert urls == {"u"}
    rows[:] = [PlacedServer("vllm-1", "vllm", "v", "n")]
    state = EngineState(inference_proxy_url="router")
    await watch.refresh()
    assert urls == {"v"}, "the client holds this set"
    assert watch.reasons() == []
    assert watch.why_away() == ""


def test_rows_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    with closing(Database(f"sqlite:///{tmp_path / 'db'}")) as database:
        make_tables(database)
        database.write(lambda c: write_servers(c, OWNER, [placed(number, None) for number in (10, 2, 1)]))
        read = database.read(lambda c: read_servers(c, OWNER))
        assert [server.name for server in read] == ["vllm-1", "vllm-2", "vllm-10"]
