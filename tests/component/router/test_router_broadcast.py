"""Broadcasts over small servers: who gets the request, and which answer the client gets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from small_workers import SmallWorker, small_workers

from skyrl.http.messages import Reply
from skyrl.router import broadcast
from skyrl.router.broadcast import Broadcasts
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

    async def reply(self, method: str, target: str, sent: Any = None) -> Reply:
        path, _, query = target.partition("?")
        headers = [(b"host", b"router"), (b"authorization", b"Bearer k"), (b"content-type", b"application/json")]
        body = b"" if sent is None else json.dumps(sent).encode()
        return await self.broadcasts.answer(method, path, query.encode(), headers, body)

    async def __call__(self, method: str, target: str, sent: Any = None) -> tuple[int, bytes]:
        reply = await self.reply(method, target, sent)
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


async def test_an_abort_is_not_sent_to_a_worker_that_is_dead_by_hand(world: World) -> None:
    world.pool.set_service(world.workers[0], disabled=None, is_dead=True)
    assert (await world("POST", "/abort_request", {"rid": "r"}))[0] == 200
    assert world.targets() == [[], ["/abort_request"]]


async def test_one_worker_that_aborts_is_enough(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "ABORT_QUARANTINED_S", 0.01)
    monkeypatch.setattr(broadcast, "ABORT_S", 3600)
    world.servers[0].hangs = True
    world.pool.refused(world.workers[0])
    assert await world("POST", "/abort_request", {"rid": "r"}) == (200, b"")
    await world.servers[0].stop()
    world.servers[1].answers["/abort_request"] = (400, b"why")
    assert await world("POST", "/abort_request", {"rid": "r"}) == (400, b"why")


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache", LOAD, UNLOAD])
async def test_without_workers_the_client_may_try_again(world: World, path: str) -> None:
    for worker in world.workers:
        world.pool.remove(worker.id)
    reply = await world.reply("POST", path, {})
    assert (reply.status, dict(reply.headers)[b"retry-after"]) == (503, b"1")


SAME, OTHER_PATH = {"/v1/models": models("/adapters/a-1")}, {"/v1/models": models("/adapters/a-0")}
ON_NODE = {"/v1/models": models("/tmp/cache/a")}
STORED = {"lora_name": "a", "lora_path": "skyrl-store:adapters-m/v000001"}
AWAY, NO_ADAPTER = (503, b"AdapterStoreAway"), (404, b"no such adapter")
STOPPED: Any = None


@pytest.mark.parametrize(
    ("path", "sent", "answers", "more", "expected"),
    [
        ("/flush_cache", None, [(200, b""), (200, b"")], {}, (200, b'"workers_flushed":2')),
        ("/flush_cache", None, [(200, b""), (400, b"busy")], {}, (400, b"busy")),
        ("/flush_cache", None, [(200, b""), STOPPED], {}, (502, b"1 of 2 workers did not answer")),
        ("/abort_request", {"rid": "r"}, [STOPPED, STOPPED], {}, (503, b"2 of 2 workers did not answer")),
        # a worker that has the adapter counts as loaded, if it is the same one
        (LOAD, ADAPTER, [ALREADY, (200, b"loaded")], SAME, (200, b"loaded")),
        (LOAD, ADAPTER, [ALREADY, ALREADY], SAME, ALREADY),
        *(
            (LOAD, ADAPTER, [ALREADY, (200, b"loaded")], more, ALREADY)
            for more in (OTHER_PATH, *({"/v1/models": one} for one in ((200, b"{}"), (200, b"no JSON"), (500, b""))))
        ),
        # a worker that fetched it shows the directory of its node; a reference never gets other files
        (LOAD, STORED, [ALREADY, AWAY], ON_NODE, AWAY),
        (LOAD, ADAPTER, [(200, b"loaded"), (404, b"no adapter at this path")], {}, (404, b"no adapter at this path")),
        (LOAD, ADAPTER, [STOPPED, (200, b"")], {}, (502, b"1 of 2 workers")),
        (LOAD, ADAPTER, [STOPPED, STOPPED], {}, (503, b"2 of 2 workers")),
        (UNLOAD, ADAPTER, [NO_ADAPTER, NO_ADAPTER], {}, NO_ADAPTER),
        (UNLOAD, ADAPTER, [NO_ADAPTER, (200, b"unloaded")], {}, (200, b"unloaded")),
    ],
)
async def test_one_answer_for_all_workers(
    world: World, path: str, sent: Any, answers: list[Any], more: dict[str, Any], expected: tuple[int, bytes]
) -> None:
    for server, answer in zip(world.servers, answers, strict=True):
        server.answers |= more | ({} if answer is STOPPED else {path: answer})
        if answer is STOPPED:
            await server.stop()
    status, body = await world("POST", path, sent)
    assert status == expected[0]
    assert expected[1] in body


async def test_a_flush_keeps_its_method_and_query(world: World) -> None:
    for method in ("GET", "POST"):
        assert (await world(method, "/flush_cache?timeout=5"))[0] == 200
    assert world.targets() == [["/flush_cache?timeout=5"] * 2] * 2
    assert [[got.method for got in server.got] for server in world.servers] == [["GET", "POST"]] * 2


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


@pytest.mark.parametrize(("method", "path"), [("GET", "/abort_request"), ("GET", LOAD), ("DELETE", "/flush_cache")])
async def test_another_method_reaches_no_worker(world: World, method: str, path: str) -> None:
    assert (await world(method, path))[0] == 405
    assert world.targets() == [[], []]
