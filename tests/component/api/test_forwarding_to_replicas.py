"""The forwarding client with the real router in front of scripted replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from adapter_hosts import HostWithAllAdapters
from fake_upstream import COMPLETIONS, LOAD, FakeUpstream, Received, Reply, complete, error, hang_up, reply
from replicas import Server, servers
from test_forwarding_failures import ADAPTER, JOB, WHOLE, decoded

from skyrl.base.wire.errors import FailedRequest
from skyrl.http.client import HttpClient
from skyrl.sampling import retries
from skyrl.sampling.client import MAX_INTERRUPTIONS, ForwardingClient
from skyrl.sampling.job import SampleJob
from skyrl.sampling.servers import FixedEndpoint
from tests.component.router_world import RunningRouter, running_router, until

KEY = "key"
DYING = {"/health": reply(503, b"")}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(retries, "MAX_BACKOFF_S", 0.02)


@asynccontextmanager
async def routed(
    *replicas: FakeUpstream, interval_s: float = 1000.0
) -> AsyncIterator[tuple[RunningRouter, ForwardingClient]]:
    """A router that begins with these workers, and a client of the router that knows them."""
    urls = tuple(replica.url for replica in replicas)
    options = {
        "workers": urls,
        "key": KEY,
        "names_workers": True,
        "policy": "adapter_affinity",
        "base_models": ("base",),
    }
    async with running_router(**options, health_check_interval_s=interval_s, hang_s=1000.0) as router:
        await until(lambda: router.app.status()["routable"] == len(urls))
        client = ForwardingClient(
            HttpClient(), FixedEndpoint(router.url), HostWithAllAdapters(), api_key=KEY, deadline_s=60, replicas=urls
        )
        try:
            yield router, client
        finally:
            await client.close()


@asynccontextmanager
async def upstreams(count: int = 2) -> AsyncIterator[list[FakeUpstream]]:
    async with servers(count) as behind:
        for server in behind:
            for path in (COMPLETIONS, LOAD):
                del server.upstream.controls[path]
        yield [server.upstream for server in behind]


def sent_to(upstream: FakeUpstream, path: str) -> list[Received]:
    return [request for request in upstream.requests if request.path == path]


async def remove(router: RunningRouter, url: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with router.session.post(f"{router.url}/remove_worker?url={url}", headers=headers) as answer:
        assert answer.status == 200


def times(count: int, first: Reply, then: Reply) -> Reply:
    """Reply with `first` so many times, and with `then` afterwards."""
    left = [count]

    async def send(*arguments: object) -> None:
        left[0] -= 1
        await (first if left[0] >= 0 else then)(*arguments)  # type: ignore[arg-type]

    return send


async def test_an_adapter_is_loaded_on_the_replica_that_lacks_it() -> None:
    async with servers(2) as behind, routed(*(server.upstream for server in behind)) as (_, client):
        answer = await client.sample(ADAPTER)
        assert decoded(answer) == WHOLE
        assert sorted(len(server.adapters) for server in behind) == [0, 1]
        assert client.counts["adapter_reloads"] == 1


async def test_each_replica_may_lack_the_adapter_as_often_as_one_server() -> None:
    """The third 404 of one server fails a sample. Here three replicas lack the adapter once, and each gets one load."""
    async with servers(3) as behind, routed(*(server.upstream for server in behind)) as (router, client):
        for server in behind:
            server.upstream.controls[LOAD] = once_loaded(server, router)
        assert decoded(await client.sample(ADAPTER)) == WHOLE
        assert client.counts["adapter_reloads"] == 3


def once_loaded(server: Server, router: RunningRouter) -> Reply:
    """Load the adapter. Then the router sends the next sample elsewhere, unless all replicas have the adapter."""
    load = server.upstream.controls[LOAD]

    async def send(request: object, writer: object) -> None:
        if len(router.app.status()["workers"]) > 1:  # type: ignore[arg-type]
            await remove(router, server.url)
        await load(request, writer)  # type: ignore[arg-type]

    return send


async def test_a_replica_that_breaks_off_interrupts_a_sample() -> None:
    async with upstreams() as (one, two), routed(one, two) as (_, client):
        for replica in (one, two):
            replica.controls[COMPLETIONS] = times(1, hang_up, complete())
        assert decoded(await client.sample(JOB)) == WHOLE
        assert client.counts["interrupted"] >= 1
        assert client.counts["upstream_away"] == 0


async def test_a_dying_replica_interrupts_samples_and_fails_none() -> None:
    """A dying vLLM answers all requests with 500 for a second. The router is well, because the other replica is."""
    async with upstreams() as (one, two), routed(one, two) as (_, client):
        for replica in (one, two):
            replica.controls |= DYING | {COMPLETIONS: error(500, "the engine is dead")}
        sampling = asyncio.create_task(client.sample(JOB))
        async with asyncio.timeout(60):
            while not client.counts["interrupted"]:  # noqa: ASYNC110 - sockets set no event
                await asyncio.sleep(0.01)
        for replica in (one, two):
            replica.controls |= {"/health": reply(200, b""), COMPLETIONS: complete()}
        assert decoded(await sampling) == WHOLE
        assert client.counts["interrupted"] == client.counts["upstream_error"] == 1


async def test_a_500_of_a_replica_that_is_well_is_an_answer() -> None:
    async with upstreams() as (one, two), routed(one, two) as (_, client):
        for replica in (one, two):
            replica.controls[COMPLETIONS] = error(500, "a bug")
        with pytest.raises(FailedRequest, match="a bug"):
            await client.sample(JOB)
        assert client.counts["interrupted"] == 0


async def test_a_sample_that_kills_each_replica_fails_after_as_many_deaths_as_with_one() -> None:
    async with upstreams(3) as replicas, routed(*replicas) as (_, client):
        for replica in replicas:
            replica.controls[COMPLETIONS] = hang_up
        with pytest.raises(FailedRequest, match=f"broke {MAX_INTERRUPTIONS + 1} times"):
            await client.sample(JOB)
        assert sum(len(sent_to(replica, COMPLETIONS)) for replica in replicas) == MAX_INTERRUPTIONS + 1


async def test_a_server_that_is_no_replica_is_not_asked_because_an_answer_names_it() -> None:
    async with upstreams(2) as (one, stranger):
        one.controls[COMPLETIONS] = times(1, reply(404, {"error": "no"}, x_skyrl_worker=stranger.url), complete())
        client = ForwardingClient(
            HttpClient(),
            FixedEndpoint(one.url),
            HostWithAllAdapters(),
            api_key=KEY,
            deadline_s=60,
            replicas=["http://x"],
        )
        assert decoded(await client.sample(ADAPTER)) == WHOLE
        assert stranger.requests == []
        assert len(sent_to(one, LOAD)) == 1
        await client.close()


async def test_samples_of_one_sampling_session_go_to_one_replica() -> None:
    async with upstreams(3) as replicas, routed(*replicas) as (_, client):
        for replica in replicas:
            replica.controls[COMPLETIONS] = complete()
        homes = set()
        for session in range(12):
            for replica in replicas:
                replica.requests.clear()
            for number in range(3):
                await client.sample(of_session(JOB, session, number))
            (home,) = [replica.url for replica in replicas if sent_to(replica, COMPLETIONS)]
            homes.add(home)
        assert len(homes) > 1, "different sessions have different replicas"


def of_session(job: SampleJob, session: int, number: int) -> SampleJob:
    return msgspec.structs.replace(job, session_key=f"sampler-{session}:{number}")


async def test_the_replicas_in_use_are_counted() -> None:
    async with upstreams(2) as (one, two), routed(one, two) as (router, client):
        assert await client.replicas_in_use() == 2
        await until(lambda: bool(sent_to(one, "/health")))
        assert sent_to(one, "/health")[0].headers["authorization"] == f"Bearer {KEY}", "vLLM refuses other probes"
        await remove(router, one.url)
        assert await client.replicas_in_use() == 1
    assert await client.replicas_in_use() == 0
