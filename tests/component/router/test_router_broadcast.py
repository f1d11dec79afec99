"""Broadcasts over small servers: who gets the request, and which answer the client gets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from small_workers import SmallWorker, small_workers

from skyrl.router import broadcast
from skyrl.router.broadcast import Broadcasts
from skyrl.router.messages import Reply
from skyrl.router.policies import LeastInFlight
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import fetch

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ALREADY = (400, b'{"error":{"message":"The lora adapter \'a\' has already been loaded. If you want to load it again"}}')
ADAPTER = {"lora_name": "a", "lora_path": "/adapters/a-1"}


def models(path: str) -> tuple[int, bytes]:
    return 200, json.dumps({"data": [{"id": "base", "root": "m"}, {"id": "a", "root": path}]}).encode()


class World:
    """Two registered servers, and the broadcasts over them."""

    def __init__(self, servers: list[SmallWorker]) -> None:
        self.servers = servers
        self.pool = WorkerPool(LeastInFlight())
        self.workers = [self.pool.add(server.url) for server in servers]
        self.broadcasts = Broadcasts(self.pool, fetch)

    async def reply(self, method: str, target: str, sent: Any = None) -> Reply | None:
        path, _, query = target.partition("?")
        headers = [(b"host", b"router"), (b"authorization", b"Bearer k"), (b"content-type", b"application/json")]

        async def body() -> bytes:
            return b"" if sent is None else json.dumps(sent).encode()

        return await self.broadcasts.answer(method, path, query.encode(), headers, body)

    async def __call__(self, method: str, target: str, sent: Any = None) -> tuple[int, bytes]:
        reply = await self.reply(method, target, sent)
        assert reply is not None
        return reply.status, reply.body

    def targets(self) -> list[list[str]]:
        return [[got.target for got in server.got] for server in self.servers]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with small_workers(2) as servers:
        yield World(servers)


async def test_an_abort_reaches_every_worker_as_it_was_sent(world: World) -> None:
    assert await world("POST", "/abort_request", {"rid": "r"}) == (200, b"")
    for server in world.servers:
        (got,) = server.got
        assert (got.method, got.target, json.loads(got.body)) == ("POST", "/abort_request", {"rid": "r"})
        assert got.headers["authorization"] == "Bearer k"
        assert got.headers["host"] == server.url.removeprefix("http://")


async def test_an_abort_reaches_workers_that_drain_or_are_quarantined(world: World) -> None:
    world.pool.begin(world.workers[0])
    world.pool.remove(world.workers[0].id)
    world.pool.refused(world.workers[1])
    assert (await world("POST", "/abort_request", {"rid": "r"}))[0] == 200
    assert world.targets() == [["/abort_request"], ["/abort_request"]]


async def test_one_worker_that_aborts_is_enough(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "ABORT_QUARANTINED_S", 0.01)
    monkeypatch.setattr(broadcast, "ABORT_S", 3600)
    world.servers[0].hangs = True
    world.pool.refused(world.workers[0])
    assert await world("POST", "/abort_request", {"rid": "r"}) == (200, b"")
    await world.servers[0].stop()
    world.servers[1].answers["/abort_request"] = (400, b"why")
    assert await world("POST", "/abort_request", {"rid": "r"}) == (400, b"why")


async def test_an_abort_that_no_worker_got_is_no_success(world: World) -> None:
    for server in world.servers:
        await server.stop()
    status, body = await world("POST", "/abort_request", {"rid": "r"})
    assert status == 503
    assert [worker["url"] for worker in json.loads(body)["error"]["workers"]] == [w.url for w in world.workers]


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache", LOAD, UNLOAD])
async def test_without_workers_the_client_may_try_again(world: World, path: str) -> None:
    for worker in world.workers:
        world.pool.remove(worker.id)
    reply = await world.reply("POST", path, {})
    assert reply is not None
    assert (reply.status, dict(reply.headers)[b"retry-after"]) == (503, b"1")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_flush_succeeds_when_all_caches_are_flushed(world: World, method: str) -> None:
    status, body = await world(method, "/flush_cache?timeout=5")
    assert (status, json.loads(body)["workers_flushed"]) == (200, 2)
    assert world.targets() == [["/flush_cache?timeout=5"]] * 2
    assert {got.method for server in world.servers for got in server.got} == {method}
    world.servers[1].answers["/flush_cache"] = (400, b"busy")
    assert await world(method, "/flush_cache") == (400, b"busy")


async def test_a_flush_that_a_worker_missed_is_no_success(world: World) -> None:
    await world.servers[1].stop()
    status, body = await world("POST", "/flush_cache")
    assert status == 502
    assert "1 of 2 workers did not answer" in json.loads(body)["error"]["message"]


async def test_adapters_are_loaded_and_unloaded_on_every_routable_worker(world: World) -> None:
    world.servers[0].answers[LOAD] = (200, b"first")
    world.servers[1].answers[LOAD] = (200, b"second")
    reply = await world.reply("POST", LOAD, ADAPTER)
    assert reply == Reply(200, [(b"content-type", b"text/x-test")], b"first")
    world.pool.refused(world.workers[0])
    assert (await world("POST", UNLOAD, {"lora_name": "a"}))[0] == 200
    assert world.targets() == [[LOAD], [LOAD, UNLOAD]]


async def test_adapters_go_to_the_address_of_completions(world: World) -> None:
    first, second = world.servers
    world.pool.remove(second.url)
    world.pool.add(first.url, second.url)
    assert (await world("POST", LOAD, ADAPTER))[0] == 200
    assert world.targets() == [[], [LOAD]]


async def test_a_worker_that_has_the_adapter_counts_as_loaded(world: World) -> None:
    world.servers[0].answers |= {LOAD: ALREADY, "/v1/models": models("/adapters/a-1")}
    world.servers[1].answers[LOAD] = (200, b"loaded")
    assert await world("POST", LOAD, ADAPTER) == (200, b"loaded")
    assert world.servers[0].got[1].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize("answer", [models("/adapters/a-0"), (200, b"{}"), (200, b"no JSON"), (500, b"")])
async def test_a_worker_that_may_have_other_weights_under_the_name_does_not_count(
    world: World, answer: tuple[int, bytes]
) -> None:
    world.servers[0].answers |= {LOAD: ALREADY, "/v1/models": answer}
    assert await world("POST", LOAD, ADAPTER) == ALREADY


async def test_a_worker_that_fetched_the_adapter_from_the_store_counts_as_loaded(world: World) -> None:
    """It shows the directory of its node. A reference never gets other files."""
    world.servers[0].answers |= {LOAD: ALREADY, "/v1/models": models("/tmp/cache/a")}
    world.servers[1].answers[LOAD] = (503, b"AdapterStoreAway")
    reference = {"lora_name": "a", "lora_path": "skyrl-store:adapters-m/v000001"}
    assert await world("POST", LOAD, reference) == (503, b"AdapterStoreAway")


async def test_an_adapter_that_all_workers_had_is_answered_as_one_server_would(world: World) -> None:
    for server in world.servers:
        server.answers |= {LOAD: ALREADY, "/v1/models": models("/adapters/a-1"), UNLOAD: (404, b"no such adapter")}
    assert await world("POST", LOAD, ADAPTER) == ALREADY
    assert await world("POST", UNLOAD, ADAPTER) == (404, b"no such adapter")


async def test_an_adapter_that_one_worker_lacks_is_unloaded(world: World) -> None:
    world.servers[0].answers[UNLOAD] = (404, b"no such adapter")
    world.servers[1].answers[UNLOAD] = (200, b"unloaded")
    assert await world("POST", UNLOAD, ADAPTER) == (200, b"unloaded")


async def test_the_first_failure_is_the_answer(world: World) -> None:
    world.servers[1].answers[LOAD] = (404, b"no adapter at this path")
    assert await world("POST", LOAD, ADAPTER) == (404, b"no adapter at this path")


async def test_a_worker_that_does_not_answer_is_no_success(world: World) -> None:
    await world.servers[0].stop()
    assert (await world("POST", LOAD, ADAPTER))[0] == 502
    await world.servers[1].stop()
    assert (await world("POST", LOAD, ADAPTER))[0] == 503


@pytest.mark.parametrize(("method", "path"), [("GET", "/abort_request"), ("GET", LOAD), ("DELETE", "/flush_cache")])
async def test_another_method_reaches_no_worker(world: World, method: str, path: str) -> None:
    assert (await world(method, path))[0] == 405
    assert world.targets() == [[], []]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/abort_requests", "/"])
async def test_other_paths_are_left_to_the_proxy(world: World, path: str) -> None:
    assert await world.reply("POST", path) is None
