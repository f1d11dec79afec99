"""Changes of weights on all workers through the router: who gets them, the one answer, and requests meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from skyrl.base.tiny import model_path
from skyrl.router.proxy import Limits
from tests.component.router_world import Exchange, FakeWorker, RunningRouter, running_router, steps, until
from tests.component.sidecar_world import (
    FakeVllm,
    RunningSidecar,
    answers,
    choice,
    completion,
    running_sidecar,
    sidecar_before,
)

DISK, GROUP, INIT = "/update_weights_from_disk", "/update_weights_from_distributed", "/init_weights_update_group"
SAMPLE = "/generate"
ENDS_S = 30.0
"""Far below the bounds of a change, 300 s for its turn and 600 s for itself."""
HANGS = 0
"""The status of an answer that never comes."""


class Trained(FakeWorker):
    """Answers admin routes with `answers`, after `go` is set. Other requests are answered with the worker's name."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(self._script)
        self.name = name
        self.version = "1"
        self.answers: dict[str, tuple[int, Any]] = {}
        self.more = more
        self.go = asyncio.Event()
        self.go.set()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(one.body or b"{}") for one in self.received if one.path.partition("?")[0] == path]

    async def _script(self, exchange: Exchange) -> None:
        path = exchange.request.path.partition("?")[0]
        if path == SAMPLE:
            await exchange.answer(self.name.encode())
            return
        if path == "/server_info":
            status, value = self.answers.get(path, (200, self.more))
            if status == HANGS:
                await asyncio.Event().wait()
            await exchange.answer(json.dumps(value).encode(), f"{status} X")
            return
        await self.go.wait()
        body = {"weight_version": self.version} if path == "/model_info" else {"success": True, "message": "done"}
        status, value = self.answers.get(path, (200, body))
        await exchange.answer(json.dumps(value).encode(), f"{status} X")


async def post(router: RunningRouter, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with router.session.post(router.url + path, json={} if body is None else body, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)


async def put(router: RunningRouter, worker: FakeWorker, body: Any) -> tuple[int, Any]:
    async with router.session.put(f"{router.url}/workers/{worker_id(router, worker)}", json=body) as answer:
        return answer.status, await answer.json()


def worker_id(router: RunningRouter, worker: FakeWorker) -> str:
    found = router.app.pool.find(worker.url)
    assert found is not None
    return found.id


def listed(router: RunningRouter, worker: FakeWorker) -> Any:
    workers: Any = router.app.status()["workers"]
    return next(one for one in workers if one["url"] == worker.url)


async def sampled(router: RunningRouter, times: int = 4) -> set[str]:
    names = set()
    for _ in range(times):
        async with router.session.post(router.url + SAMPLE, data=b"x") as answer:
            assert answer.status == 200, await answer.text()
            names.add(await answer.text())
    return names


@contextlib.asynccontextmanager
async def two(**options: Any) -> AsyncIterator[tuple[RunningRouter, Trained, Trained]]:
    first, second = Trained("first"), Trained("second")
    async with running_router(first, second, policy="round_robin", **options) as router:
        yield router, first, second


@contextlib.asynccontextmanager
async def changing(
    router: RunningRouter, worker: Trained, path: str = DISK, body: Any = None
) -> AsyncIterator[asyncio.Task[tuple[int, Any]]]:
    """A change that `worker` has got, and answers after the body."""
    worker.go.clear()
    change = asyncio.create_task(post(router, path, body))
    await until(lambda: worker.bodies(path))
    try:
        yield change
    finally:
        worker.go.set()
        assert (await change)[0] == 200


async def test_every_worker_gets_the_request_and_the_answer_names_each() -> None:
    async with two() as (router, first, second):
        body = {"model_path": "/a", "weight_version": "2"}
        status, answer = await post(router, DISK + "?x=1", body, authorization="Bearer k")
        assert status == 200
        assert answer == {
            "success": True,
            "message": "ok",
            "path": DISK,
            "worker_count": 2,
            "results": [
                {"worker": one.url, "success": True, "status_code": 200, "body": {"success": True, "message": "done"}}
                for one in (first, second)
            ],
        }
        for worker in (first, second):
            assert worker.bodies(DISK) == [body]
            assert worker.received[-1].path == DISK + "?x=1"
            assert worker.received[-1].header("authorization") == ["Bearer k"]


async def test_what_all_answer_alike_is_where_a_client_of_one_server_looks() -> None:
    async with two() as (router, first, second):
        for worker in (first, second):
            payload = [{"per_gpu_checksum": "c"}]
            worker.answers["/weights_checker"] = (200, {"success": True, "payload": payload, "n": worker.name})
            worker.answers["/get_weights_by_name"] = (200, [[1.0]])
        status, answer = await post(router, "/weights_checker")
        assert (status, answer["payload"]) == (200, [{"per_gpu_checksum": "c"}])
        assert "n" not in answer
        assert await post(router, "/get_weights_by_name", {"name": "w"}) == (200, [[1.0]])
        second.answers["/get_weights_by_name"] = (200, [[2.0]])
        status, answer = await post(router, "/get_weights_by_name", {"name": "w"})
        assert [one["body"] for one in answer["results"]] == [[[1.0]], [[2.0]]]


UPDATE = {"model_path": str(model_path()), "weight_version": "2"}
IN_FLIGHT = "{} requests are in flight: set abort_all_requests, or pause generation before"


def refused(message: str, **error: Any) -> dict[str, Any]:
    """As the sidecar refuses a change."""
    return {"success": False, "message": message, "error": {"message": message, **error}}


@pytest.mark.parametrize(
    ("answers", "status", "message"),
    [
        ([(200, {"success": True}), (400, refused("no"))], 502, "no (so say 1 of 2 workers)"),
        ([(200, {"success": True}), (200, {"success": False})], 502, "status 200 without a reason (so say 1 of 2"),
        ([(500, {}), (500, {})], 502, "status 500 without a reason"),
        ([(500, refused("broken")), (500, refused("broken"))], 502, "broken"),
        ([(400, {"success": False}), (400, {"success": False})], 400, "status 400 without a reason"),
        ([(400, refused(IN_FLIGHT.format(3))), (400, refused(IN_FLIGHT.format(17)))], 400, IN_FLIGHT.format(3)),
        ([(400, refused("no")), (400, refused("never"))], 400, "workers failed for different reasons, the first, "),
        ([(400, refused("no")), (503, refused("no"))], 502, "no"),
        ([(501, refused("not offered"))] * 2, 501, "not offered"),
        ([(503, refused("vLLM is away"))] * 2, 503, "vLLM is away"),
        ([(404, {"detail": "Not Found"})] * 2, 404, "Not Found"),
        ([(400, {"error": {"message": "no tensor"}})] * 2, 400, "no tensor"),
        ([(502, "Bad Gateway")] * 2, 502, "Bad Gateway"),
    ],
)
async def test_a_failed_change_is_answered_with_the_workers_reason(
    answers: list[Any], status: int, message: str
) -> None:
    async with two() as (router, first, second):
        first.answers[DISK], second.answers[DISK] = answers
        found, answer = await post(router, DISK)
        assert (found, answer["success"]) == (status, False)
        assert answer["message"].startswith(message)
        assert answer["error"]["message"] == answer["message"]
        assert [one["status_code"] for one in answer["results"]] == [one for one, _ in answers]
        assert await sampled(router) == {"first", "second"}, "the models are as they were"


async def test_samples_in_flight_at_real_sidecars_are_the_first_sentence() -> None:
    end = asyncio.Event()
    held = steps(end, answers(completion(choice([8]))))

    async def sample(sidecar: RunningSidecar, vllm: FakeVllm, count: int) -> list[asyncio.Task[Any]]:
        asked = [asyncio.create_task(sidecar.generate()) for _ in range(count)]
        await until(lambda: len(vllm.bodies) == count)
        return asked

    one, other = FakeVllm(held), FakeVllm(held)
    async with sidecar_before(one) as first, sidecar_before(other) as second:
        asked = await sample(first, one, 1) + await sample(second, other, 2)
        async with running_router() as router:
            for sidecar in (first, second):
                async with router.session.post(f"{router.url}/add_worker", json={"url": sidecar.url}) as added:
                    assert added.status == 200
            status, answer = await post(router, DISK, UPDATE)
            end.set()
            assert {(await one)[0] for one in asked} == {200}
    assert answer["message"].startswith("1 requests are in flight: set abort_all_requests, or pause generation before")
    assert status == 400
    assert "2 requests" in answer["results"][1]["body"]["message"]


async def test_the_workers_code_stays_and_a_long_reason_is_cut() -> None:
    async with two() as (router, first, second):
        for worker in (first, second):
            worker.answers[DISK] = (503, refused("x" * 10_000, code="worker_interrupted"))
        async with router.session.post(router.url + DISK, json={}) as answer:
            assert answer.headers["retry-after"] == "1"
            error = (await answer.json())["error"]
        assert error["code"] == "worker_interrupted"
        assert len(error["message"]) == 2_000


async def test_the_reason_of_workers_that_cannot_be_reached() -> None:
    async with two(admin_update_s=0.05) as (router, first, second):
        first.go.clear()
        second.go.clear()
        status, answer = await post(router, DISK)
        assert (status, answer["message"]) == (502, "no answer within 0.05 s")
        first.go.set()
        second.go.set()


async def test_requests_go_elsewhere_and_wait_while_weights_change() -> None:
    async with two() as (router, first, second):
        await put(router, second, {"is_dead": True})
        async with changing(router, first):
            assert listed(router, first)["changing"]
            waiting = asyncio.create_task(sampled(router, 1))
            await asyncio.sleep(0)
            await put(router, second, {"is_dead": False})
            assert await waiting == {"second"}
            assert await sampled(router) == {"second"}
        assert await sampled(router) == {"first"}, "the other one was dead when the change began"
        await put(router, second, {"disabled": False})
        assert await sampled(router) == {"first", "second"}


@pytest.mark.parametrize("short_way", [True, False])
async def test_requests_wait_while_the_weights_of_all_workers_change(short_way: bool) -> None:
    worker = Trained("only")
    async with running_router(worker, short_way=short_way) as router:
        async with changing(router, worker, "/pause_generation"):
            before = len(worker.received)
            waiting = [asyncio.create_task(sampled(router, 1)) for _ in range(5)]
            gone = asyncio.create_task(sampled(router, 1))
            await until(lambda: len(router.server.server_state.tasks) >= 7)
            gone.cancel()
            await until(lambda: router.app.counts["client_left"] == 1)
            assert len(worker.received) == before
            async with router.session.get(f"{router.url}/readyz") as answer:
                assert answer.status == 200
        assert await asyncio.gather(*waiting) == [{"only"}] * 5


async def test_waiting_for_new_weights_has_a_bound() -> None:
    worker = Trained("only")
    async with (
        running_router(worker, limits=Limits(change_s=0.05)) as router,
        changing(router, worker),
        router.session.post(router.url + SAMPLE, data=b"x") as answer,
    ):
        assert answer.status == 503
        assert "weights of all workers" in (await answer.json())["error"]["message"]


async def test_requests_do_not_wait_for_a_worker_that_stays_out_after_its_change() -> None:
    worker = Trained("only")
    async with running_router(worker, limits=Limits(change_s=ENDS_S)) as router:
        async with changing(router, worker):
            waiting = asyncio.create_task(router.session.post(router.url + SAMPLE, data=b"x").__aenter__())
            await until(lambda: len(router.server.server_state.tasks) == 2)
            await put(router, worker, {"disabled": True})
        answer = await waiting
        assert (answer.status, (await answer.json())["error"]["message"]) == (503, "no worker is routable")


async def test_one_change_at_a_time() -> None:
    async with two(admin_lock_s=0.05) as (router, first, second):
        async with changing(router, first):
            status, answer = await post(router, GROUP)
            assert status == 503
            assert answer["message"].startswith("admin update lock not acquired within 0.05s; another update operation")
            assert not second.bodies(GROUP)
            going_on = asyncio.create_task(post(router, "/continue_generation"))
            await until(lambda: first.bodies("/continue_generation"))
            first.go.set()
            assert (await going_on)[0] == 200, "it needs no lock"
        assert (await post(router, GROUP))[0] == 200


async def test_a_client_that_leaves_does_not_stop_a_change() -> None:
    async with two() as (router, first, second):
        first.go.clear()
        async with aiohttp.ClientSession() as session:
            leaving = asyncio.create_task(session.post(router.url + DISK, json={"weight_version": "2"}))
            await until(lambda: first.bodies(DISK))
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        assert listed(router, second)["changing"]
        first.go.set()
        await until(lambda: not listed(router, second)["changing"])
        assert await sampled(router) == {"first", "second"}


async def test_an_operators_change_meanwhile_is_kept() -> None:
    async with two() as (router, first, second):
        async with changing(router, first):
            status, answer = await put(router, second, {"disabled": True, "reason": "it is hot"})
            assert (status, answer["worker"]["disabled_reason"]) == (200, "it is hot")
        assert await sampled(router) == {"first"}
        assert (await post(router, DISK))[0] == 200
        assert len(second.bodies(DISK)) == 2, "a disabled worker gets new weights, too"
        await put(router, second, {"disabled": False})
        assert await sampled(router) == {"first", "second"}


async def test_a_group_that_was_not_formed_disables_its_worker() -> None:
    async with two() as (router, first, second):
        first.answers[INIT] = (400, {"success": False, "message": "nobody came"})
        status, _ = await post(router, INIT, {"rank_offset": 1, "world_size": 3})
        assert status == 502
        assert await sampled(router) == {"second"}
        assert "nobody came" in listed(router, first)["disabled"]
        first.answers.clear()
        assert (await post(router, DISK))[0] == 200
        assert await sampled(router) == {"second"}, "it is enabled by hand alone"
        await put(router, first, {"disabled": False})
        assert await sampled(router) == {"first", "second"}


async def test_each_worker_gets_ranks_of_its_own() -> None:
    first, second = Trained("first", tp_size=2, pp_size=2), Trained("second", tp_size=2)
    async with running_router(first, second) as router:
        group = {"master_address": "a", "master_port": 1, "rank_offset": 1, "group_name": "g"}
        status, answer = await post(router, INIT, group | {"world_size": 3})
        assert status == 422
        assert "world_size: must be 7, not 3" in answer["message"]
        assert not first.bodies(INIT)
        status, answer = await post(router, INIT, {"group_name": "g"})
        assert (status, answer["message"][:24]) == (422, "rank_offset, world_size:")
        assert (await post(router, INIT, group | {"world_size": 7}))[0] == 200
        assert [one.bodies(INIT)[0]["rank_offset"] for one in (first, second)] == [1, 5]
        assert second.bodies(INIT) == [group | {"world_size": 7, "rank_offset": 5}]


@pytest.mark.parametrize("status", [503, HANGS])
async def test_no_group_is_formed_while_the_ranks_of_a_worker_are_not_known(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.router.admin.RANKS_S", 2.0)  # the other worker answers within it
    async with two() as (router, first, second):
        second.answers["/server_info"] = (status, {})
        found, answer = await post(router, INIT, {"rank_offset": 1, "world_size": 3})
        assert (found, answer["success"]) == (502, False)
        assert [one["success"] for one in answer["results"]] == [True, False]
        for worker in (first, second):
            assert not worker.bodies(INIT)
            assert listed(router, worker)["disabled"] is None


async def test_a_dead_worker_is_no_member_of_a_group() -> None:
    async with two() as (router, first, second):
        await first.stop()
        await until(lambda: listed(router, first)["state"] == "quarantined")
        status, answer = await post(router, INIT, {"rank_offset": 1, "world_size": 3})
        assert (status, answer["message"][:28]) == (422, "world_size: must be 2, not 3")
        status, answer = await post(router, INIT, {"rank_offset": 1, "world_size": 2})
        assert (status, answer["worker_count"]) == (200, 1)
        assert [one.get("dead") for one in answer["results"]] == [None, True]
        assert second.bodies(INIT) == [{"rank_offset": 1, "world_size": 2}]
        assert listed(router, first)["disabled"] is None
        async with router.session.delete(f"{router.url}/workers/{worker_id(router, second)}") as answer:
            assert answer.status == 202
        assert (await post(router, INIT, {"rank_offset": 1, "world_size": 2}))[0] == 503
        assert listed(router, first)["disabled"] is None, "it did not fail: it was not there"


async def test_a_worker_that_was_dead_during_an_update_stays_out_until_it_has_it() -> None:
    async with two() as (router, first, second):
        await second.stop()
        await until(lambda: listed(router, second)["state"] == "quarantined")
        status, answer = await post(router, DISK, {"model_path": "/a", "weight_version": "2"})
        assert (status, answer["worker_count"]) == (200, 1)
        assert answer["results"][1]["dead"] is True
        await second.start()
        await until(lambda: listed(router, second)["state"] == "healthy")
        assert listed(router, second)["missed"] == "the update of the weights to version 2"
        assert await sampled(router) == {"first"}
        second.answers[GROUP] = (200, {"success": True, "applied": False})
        await post(router, GROUP)
        assert await sampled(router) == {"first"}, "a bucket is not the whole update"
        assert (await post(router, DISK))[0] == 200
        assert await sampled(router) == {"first", "second"}


@pytest.mark.parametrize("named", ["2", None])
async def test_a_worker_that_is_registered_during_an_update_has_missed_it(named: str | None) -> None:
    """Of an update without a version, the workers tell which one it has."""
    async with two() as (router, first, second):
        first.answers[DISK] = (200, {"success": True, "applied": True, "weight_version": "2"})
        async with router.session.delete(f"{router.url}/workers/{worker_id(router, second)}") as answer:
            assert answer.status == 202
        async with changing(router, first, body={"weight_version": named}):
            await post(router, "/workers", {"url": second.url, "starting": True})
            await until(lambda: listed(router, second)["state"] == "healthy")
        assert listed(router, second)["missed"] == "the update of the weights to version 2"
        assert await sampled(router) == {"first"}
        assert (await post(router, DISK))[0] == 200
        assert await sampled(router) == {"first", "second"}


async def test_a_worker_set_dead_by_hand_gets_nothing_and_misses_updates() -> None:
    async with two() as (router, first, second):
        await put(router, first, {"is_dead": True})
        status, answer = await post(router, DISK, {"weight_version": "2"})
        assert (status, answer["worker_count"]) == (200, 1)
        dead = {"worker": first.url, "success": False, "error": "it is dead, says an operator", "dead": True}
        assert answer["results"][0] == dead
        assert not first.bodies(DISK)
        await put(router, second, {"is_dead": True})
        assert (await post(router, DISK))[0] == 503
        assert listed(router, second)["missed"] is None, "nobody got this update"
        for worker in (first, second):
            await put(router, worker, {"is_dead": False})
        assert await sampled(router) == {"second"}, "the first has old weights"
        assert (await put(router, first, {"disabled": False}))[1]["worker"]["missed"] is None
        assert await sampled(router) == {"first", "second"}


async def test_what_put_takes() -> None:
    async with two() as (router, first, _):
        for body, field in (
            ({}, "disabled, is_dead"),
            ({"disabled": 1}, "disabled"),
            ({"is_dead": "x"}, "is_dead"),
            ({"disabled": True, "reason": 5}, "reason"),
            ({"disabled": True, "state": "healthy"}, "state"),
            ([], "body"),
        ):
            status, answer = await put(router, first, body)
            assert status == 400
            assert answer["error"]["message"].startswith(field)
        async with router.session.put(f"{router.url}/workers/nobody", json={"disabled": True}) as answer:
            assert answer.status == 404
        quoted = first.url.replace("/", "%2F")
        async with router.session.put(
            f"{router.url}/workers/{quoted}", data=b'{"disabled":true}', headers={"content-type": "application/json"}
        ) as answer:
            assert answer.status == 200
        assert listed(router, first)["disabled"] == "by hand"


async def test_what_is_set_by_hand_survives_a_restart(tmp_path: Path) -> None:
    first, second = Trained("first"), Trained("second")
    async with running_router(first, second, state_dir=tmp_path) as router:
        await put(router, first, {"disabled": True, "reason": "it is hot"})
    first, again = Trained("first"), first
    first.port = again.port
    await first.start()
    try:
        async with running_router(state_dir=tmp_path) as router:
            await until(lambda: listed(router, first)["state"] == "healthy")
            assert listed(router, first)["disabled"] == "it is hot"
            assert not router.app.pool.routable
    finally:
        await first.stop()


async def test_versions_of_all_workers() -> None:
    async with two() as (router, first, second):
        for method in (router.session.get, router.session.post):
            async with method(router.url + "/model_info") as answer:
                info = await answer.json()
                assert (answer.status, info["weight_version"], info["workers"]) == (200, "1", [first.url, second.url])
        second.version = "2"
        async with router.session.get(router.url + "/model_info") as answer:
            detail = (await answer.json())["detail"]
            assert (answer.status, detail["message"]) == (409, "mixed worker weight_version")
            assert detail["mixed_state"] == {"weight_version": {first.url: "1", second.url: "2"}}


async def test_a_worker_that_does_not_tell_its_version_is_a_502() -> None:
    async with two() as (router, _, second):
        second.answers["/model_info"] = (503, {"error": "busy"})
        status, answer = await post(router, "/model_info")
        assert (status, answer["success"], answer["worker_count"]) == (502, False, 2)
        await second.stop()
        await until(lambda: listed(router, second)["state"] == "quarantined")
        status, answer = await post(router, "/model_info")
        assert (status, len(answer["workers"])) == (200, 1), "a dead one has no version"


async def test_requests_in_flight_outlast_a_change_in_which_their_worker_fails_its_probes() -> None:
    """The time after which requests are broken off runs anew when the change has ended."""
    begun, finish = asyncio.Event(), asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        if exchange.request.path == SAMPLE:
            begun.set()
            await finish.wait()
        await worker._script(exchange)

    worker = Trained("only")
    worker.script = slow
    async with running_router(worker, hang_s=0.05) as router:
        sample = asyncio.create_task(sampled(router, 1))
        await begun.wait()
        async with changing(router, worker):
            worker.healthy = False
            await until(lambda: listed(router, worker)["failed_probes"] >= 6)
            worker.healthy = True
            await until(lambda: listed(router, worker)["state"] == "healthy")
        finish.set()
        assert await sample == {"only"}


async def test_tensors_between_processes_are_not_offered() -> None:
    async with two() as (router, _, _):
        router.app.max_body_bytes = 8  # the bodies of such updates are long, and none is read
        status, answer = await post(router, "/update_weights_from_tensor", {"tensors": "many"})
        assert (status, answer["error"]["code"]) == (501, "not_implemented")
        async with router.session.get(router.url + DISK) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_a_key_guards_the_admin_routes_alone() -> None:
    async with two(admin_key="secret") as (router, first, _):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            status, answer = await post(router, DISK, {}, **headers)
            assert (status, answer["error"]["code"]) == (401, "unauthorized")
        assert (await put(router, first, {"disabled": True}))[0] == 401
        assert not first.bodies(DISK)
        assert await sampled(router) == {"first", "second"}
        assert (await post(router, DISK, {}, authorization="Bearer secret"))[0] == 200
        assert first.received[-1].header("authorization") == ["Bearer secret"]


@pytest.mark.parametrize("short_way", [True, False])
async def test_the_admin_key_opens_what_the_clients_key_opens(short_way: bool) -> None:
    worker = Trained("only")
    async with running_router(worker, short_way=short_way, key="client", admin_key="secret") as router:
        for key, sample, admin in (("client", 200, 401), ("secret", 200, 200), ("wrong", 401, 401)):
            headers = {"authorization": f"Bearer {key}"}
            async with router.session.post(router.url + SAMPLE, data=b"x", headers=headers) as answer:
                assert answer.status == sample
            assert (await post(router, DISK, {}, **headers))[0] == admin


async def test_without_a_key_a_client_behind_a_proxy_is_a_stranger() -> None:
    async with two() as (router, first, _):
        status, answer = await post(router, DISK, {}, **{"x-forwarded-for": "10.0.0.1"})
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        assert not first.bodies(DISK)


@pytest.mark.parametrize("short_way", [True, False])
async def test_workers_learn_that_a_client_is_not_on_this_machine(
    short_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker would take the router, which is on its machine, for the client, and let it change weights."""
    worker = Trained("only")
    async with running_router(worker, short_way=short_way) as router:
        assert await sampled(router, 1) == {"only"}
        assert worker.received[-1].header("x-forwarded-for") == []
    monkeypatch.setattr("skyrl.http.admin_key.is_on_this_machine", lambda _: False)
    worker = Trained("only")
    async with running_router(worker, short_way=short_way) as router:
        for headers, seen in (
            ({}, "127.0.0.1"),
            ({"x-forwarded-for": "10.0.0.1"}, "10.0.0.1"),
            ({"connection": "keep-alive, x-forwarded-for"}, "127.0.0.1"),
        ):
            async with router.session.post(f"{router.url}/collective_rpc", data=b"x", headers=headers):
                assert worker.received[-1].header("x-forwarded-for") == [seen]
        assert (await post(router, "/v1/load_lora_adapter"))[0] == 403
        assert (await post(router, DISK))[0] == 403
    worker = Trained("only")
    async with running_router(worker, short_way=short_way, admin_key="secret") as router:
        status, _ = await post(router, DISK, {}, authorization="Bearer secret", **{"x-forwarded-for": "10.0.0.1"})
        assert status == 200
        assert worker.received[-1].header("x-forwarded-for") == [], "the router has decided already"


async def test_every_change_ends_soon_while_the_vllm_of_a_sidecar_is_away() -> None:
    """With real sidecars: a trainer that knows the router alone is told which worker has failed, and why."""
    whole = FakeVllm(answers({"results": [{"ok": True}]}))
    async with (
        sidecar_before(whole) as first,
        running_sidecar("http://127.0.0.1:1") as second,  # nobody listens there
        running_router(workers=(first.url, second.url)) as router,
    ):
        group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
        names: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
        changes = {
            "/pause_generation": {},
            DISK: {"model_path": "/a", "weight_version": "2"},
            INIT: group,
            GROUP: names,
            "/continue_generation": {},
        }
        for path, body in changes.items():
            async with asyncio.timeout(ENDS_S):
                status, answer = await post(router, path, body)
            assert (status, answer["success"]) == (502, False), path
            failed = next(one for one in answer["results"] if one["worker"] == second.url)
            assert failed["status_code"] == 503, path
            assert "vLLM cannot be reached" in json.dumps(failed["body"]), path
