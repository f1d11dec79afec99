"""Which replicas the real router uses, as a group of scripted inference servers tells it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_upstream import COMPLETIONS, LOAD, Received, Reply
from replicas import Server, group_of, running, servers

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import ReplicaState
from skyrl.inference.router_members import NotTold, RouterMembers
from tests.component.router_world import RunningRouter, running_router

KEY = "key"
ROUTER: dict[str, Any] = {
    "key": KEY,
    "policy": "adapter_affinity",
    "health_check_interval_s": 0.02,
    "health_check_failure_threshold": 1,
}
WAIT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - other tasks and sockets set no event
            await asyncio.sleep(0.01)


def used(router: RunningRouter) -> set[str]:
    workers: list[dict[str, str]] = router.app.status()["workers"]  # type: ignore[assignment]
    return {worker["url"] for worker in workers if worker["state"] == "healthy"}


@asynccontextmanager
async def grouped(router: RunningRouter, *behind: Server) -> AsyncIterator[tuple[EngineGroup, list[str | None]]]:
    group, published = group_of(
        *(server.replica() for server in behind), proxy_url=router.url, members=RouterMembers(router.url, KEY)
    )
    async with running(group):
        yield group, published


async def test_a_replica_is_used_once_it_is_ready_and_until_it_is_lost() -> None:
    async with servers(2) as (one, two), running_router(**ROUTER) as router:
        two.dead = True
        async with grouped(router, one, two) as (group, published):
            await until(lambda: used(router) == {one.url})
            await until(lambda: published == [router.url])
            two.restart()
            await until(lambda: used(router) == {one.url, two.url})
            one.dead = True
            await until(lambda: used(router) == {two.url})
            await until(lambda: group.replicas[0].state is ReplicaState.LOST)
            one.restart()
            await until(lambda: used(router) == {one.url, two.url})
        assert published == [router.url, None]


async def test_a_replica_that_comes_back_has_the_adapters_in_use_before_it_gets_a_sample() -> None:
    adapter = AdapterVersion("m@1")
    async with servers(2) as (one, two), running_router(**ROUTER) as router:
        group, _ = group_of(
            one.replica(),
            two.replica(),
            proxy_url=router.url,
            members=RouterMembers(router.url, KEY),
            in_use=[adapter],
        )
        async with running(group):
            await until(lambda: used(router) == {one.url, two.url})
            one.dead = True
            await until(lambda: used(router) == {two.url})
            await until(lambda: group.replicas[0].state is ReplicaState.LOST)
            one.calls.clear()
            one.restart()
            await until(lambda: used(router) == {one.url, two.url})
            assert one.calls == [(LOAD, adapter.name)]


async def test_the_group_tells_a_router_that_has_lost_its_workers() -> None:
    async with (
        servers(1) as (one,),
        running_router(**ROUTER) as router,
        grouped(router, one),
    ):
        await until(lambda: used(router) == {one.url})
        headers = {"Authorization": f"Bearer {KEY}"}
        async with router.session.post(f"{router.url}/remove_worker?url={one.url}", headers=headers) as answer:
            assert answer.status == 200
        await until(lambda: used(router) == {one.url})


async def test_a_replica_that_hangs_is_not_registered_again_before_it_answers() -> None:
    async with (
        servers(2) as (one, two),
        running_router(**ROUTER, health_check_timeout_s=1.0) as router,
        grouped(router, one, two) as (group, _),
    ):
        await until(lambda: used(router) == {one.url, two.url})
        one.hang()
        await until(lambda: used(router) == {two.url})
        asked = len(two.upstream.requests)
        await until(lambda: len(two.upstream.requests) > asked + 20)
        assert used(router) == {two.url}, "the group still waits for the answer to its probe"
        assert group.replicas[0].state is ReplicaState.READY
        one.may_answer.set()
        await until(lambda: used(router) == {one.url, two.url})


async def test_a_new_engine_takes_no_replica_away() -> None:
    async with servers(1) as (one,), running_router(**ROUTER) as router:
        async with grouped(router, one):
            await until(lambda: used(router) == {one.url})
        assert used(router) == {one.url}, "the router goes on without the engine"
        one.upstream.controls[COMPLETIONS] = one.upstream.controls["/health"]  # the warm-up goes on
        async with grouped(router, one) as (group, published):
            await until(lambda: published == [router.url])
            assert used(router) == {one.url}
            assert group.ready


async def test_a_removed_replica_leaves_the_router() -> None:
    async with (
        servers(2) as (one, two),
        running_router(**ROUTER) as router,
        grouped(router, one, two) as (group, _),
    ):
        await until(lambda: used(router) == {one.url, two.url})
        await group.remove(group.replicas[0].id)
        await until(lambda: used(router) == {two.url})


async def test_many_replicas_do_not_ask_the_router_more_often_than_one() -> None:
    """Each look asks the router about all replicas, and was once made after each probe of each replica."""

    class Counted:
        told = 0

        async def update(self, used: object, left_out: object, running: object = None) -> None:
            self.told += 1

        async def close(self) -> None: ...

    interval_s, many = 0.2, 16
    async with servers(many) as behind:
        for number, server in enumerate(behind):  # spread over the interval: they did not start together
            server.upstream.controls["/health"] = late(interval_s * number / many, server.upstream.controls["/health"])
        members = Counted()
        replicas = [server.replica() for server in behind]
        group, _ = group_of(*replicas, proxy_url="http://router", members=members, watching_s=interval_s)
        async with running(group):
            await until(lambda: all(replica.state is ReplicaState.READY for replica in group.replicas))
            began, told = time.monotonic(), members.told
            probes = sum(len(server.upstream.requests) for server in behind)
            await until(lambda: sum(len(server.upstream.requests) for server in behind) > probes + 10 * many)
            assert members.told - told <= (time.monotonic() - began) / interval_s + 2
            assert members.told - told >= 2, "the group looks again without a change"


def late(seconds: float, answer: Reply) -> Reply:
    async def wait_and_answer(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        await answer(request, writer)

    return wait_and_answer


async def test_the_url_is_published_once_the_router_has_a_replica() -> None:
    class Silent:
        told = 0
        fails = True

        async def update(self, used: object, left_out: object, running: object = None) -> None:
            self.told += 1
            if self.fails:
                raise NotTold("away")

        async def close(self) -> None: ...

    members = Silent()
    async with servers(1) as (one,):
        group, published = group_of(one.replica(), proxy_url="http://router", members=members)
        async with running(group):
            await until(lambda: group.ready and members.told > 5)
            assert published == []
            members.fails = False
            await until(lambda: published == ["http://router"])


async def test_a_wrong_key_is_reported() -> None:
    async with running_router(**ROUTER) as router:
        members = RouterMembers(router.url, "wrong")
        with pytest.raises(NotTold, match="answers 401"):
            await members.update(["http://127.0.0.1:1"], [])
        await members.close()
