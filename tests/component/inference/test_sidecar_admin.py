"""The sidecar's admin key, and its routes for memory and adapters, in front of a vLLM that does what a test says.

tests/plane/test_pauses.py has real vLLMs.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from skyrl.http.admin_key import AdminKey
from skyrl.inference.remote.sidecar import PATH, PlacementRoute
from skyrl.inference.sidecar.updates import FIRST_WEIGHTS
from tests.component.router_world import Exchange, running_router, steps, until
from tests.component.sidecar_world import (
    FakeVllm,
    RunningSidecar,
    answers,
    choice,
    completion,
    sidecar_and,
    sidecar_before,
)

ADMIN = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weight_version",
    "/get_weights_by_name",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""The sidecar's own admin routes."""
VLLMS = (
    *("/pause", "/resume", "/sleep", "/wake_up", "/collective_rpc", "/abort_requests", "/reset_prefix_cache"),
    *("/start_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/unknown"),
    *("//pause", "/pause/", "/v1", "/V1/models"),
)
"""Paths of vLLM that pass through with the key alone."""
OPEN = (
    *("/health", "/health_generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info"),
    *("/weight_version", "/get_weight_version", "/abort_request", "/flush_cache", "/v1/loads", "/get_load"),
    *("/remove_worker", "/generate", "/v1/models", "/v1/completions", "/metrics", "/version", "/tokenize"),
)


OWN = ("/is_paused", "/collective_rpc", "/metrics")
"""What the sidecar asks by itself."""


def sampling() -> FakeVllm:
    vllm = FakeVllm(answers(completion(choice([8]))))
    vllm.answer["/reset_prefix_cache"] = answers({"success": True})
    for path in ("/metrics", "/version"):
        vllm.answer[path] = answers({})
    return vllm


async def test_a_stranger_gets_nothing_of_the_admin_routes() -> None:
    async with sidecar_and(sampling(), admin_key="secret") as (sidecar, vllm):
        await until(lambda: bool(vllm.received))
        before = [one.path for one in vllm.received if one.path not in OWN]
        for path in ADMIN + VLLMS:
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
                for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                    async with sidecar.session.request(method, sidecar.url + path, headers=given) as answer:
                        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), path
                        if method != "HEAD":
                            assert (await answer.json())["error"]["code"] == "unauthorized"
        assert before == [one.path for one in vllm.received if one.path not in OWN]
        assert sidecar.app.in_flight.opened.is_set()


async def test_the_key_opens_the_admin_routes_and_all_others_are_open() -> None:
    async with sidecar_and(sampling(), admin_key="secret") as (sidecar, vllm):
        for path in ADMIN + VLLMS:
            status, _ = await sidecar.post(path, b"[]", headers={"Authorization": "Bearer secret"})
            assert status not in (401, 403), path
        for path in OPEN:
            status, _ = await sidecar.post(path, {"input_ids": [5, 6, 7]} if path == "/generate" else {"prompt": "a"})
            assert status == 200, path


SENT = {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[64]]}
JOINED = {"master_address": "10.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weight_transfer_engine", {"init_info": JOINED}),
        ("/start_weight_update", {}),
        ("/start_weight_update", {"is_checkpoint_format": True}),
        ("/start_draft_weight_update", {}),
        ("/update_weights", {"update_info": SENT}),
        ("/finish_weight_update", {}),
        ("/finish_weight_update", None),
        ("/shutdown_weight_transfer_engine", None),
    ],
)
async def test_vllms_own_weight_transfer_is_refused_with_the_routes_to_use(path: str, body: Any) -> None:
    """trl 1.16 makes these calls. It shows the body of an answer that is not 200, and tries 500, 502 and 503 again."""
    vllm = sampling()
    vllm.answer |= {path: answers({"message": "done"}), "/health": answers({})}
    async with sidecar_before(vllm) as sidecar:
        async with running_router(workers=(sidecar.url,)) as router:
            await until(lambda: router.app.status()["routable"] == 1)
            for url, method in ((sidecar.url, "POST"), (sidecar.url, "GET"), (router.url, "POST")):
                async with sidecar.session.request(method, url + path, json=body) as answer:
                    message = (await answer.json())["error"]["message"]
                assert (answer.status, message.partition(":")[0]) == (501, path)
                assert "/update_weights_from_disk" in message
                assert "/init_weights_update_group" in message
        assert path not in [one.path for one in vllm.received]


async def test_vllms_form_of_server_info_is_refused_and_names_the_routes_for_new_weights() -> None:
    """trl 1.16 looks there first for the weight transfer of vLLM."""
    async with sidecar_before(sampling()) as sidecar:
        for query in ("?config_format=json", "?config_format="):
            async with sidecar.session.get(f"{sidecar.url}/server_info{query}") as answer:
                message = (await answer.json())["error"]["message"]
                assert (answer.status, message.partition(":")[0]) == (501, "config_format")
                assert "/update_weights_from_disk" in message
        async with sidecar.session.get(f"{sidecar.url}/server_info") as answer:
            assert (answer.status, (await answer.json())["internal_states"]) == (200, [])


async def test_all_own_routes_are_listed_here() -> None:
    async with sidecar_before(sampling()) as sidecar:
        own = {path for path in sidecar.app.paths if not path.startswith("/v1/")}
        assert own - set(OPEN) == set(ADMIN)


async def test_without_a_key_only_this_machine_may_change_things() -> None:
    async with sidecar_and(sampling()) as (sidecar, vllm):
        for path in ADMIN + VLLMS:
            status, answer = await sidecar.post(path, {}, headers={"X-Forwarded-For": "10.0.0.1"})
            assert (status, answer["error"]["code"]) == (403, "forbidden"), path
        assert (await sidecar.post("/generate", {"input_ids": [5, 6, 7]}, headers={"Forwarded": "for=a"}))[0] == 200
        assert (await sidecar.post("/update_weights_from_tensor", {}))[0] == 501


class SleepingVllm(FakeVllm):
    """Gives memory away as vLLM's executor does. `calls` has the calls that change it."""

    def __init__(self, *, sleep_mode: bool = True, device: str = "cuda") -> None:
        super().__init__(answers(completion(choice([8]))))
        self.asleep: set[str] = set()
        self.calls: list[str] = []
        config = {
            "device_config": {"device": device},
            "model_config": {"enable_sleep_mode": sleep_mode, "dtype": "torch.float32"},
        }
        self.answer["/server_info?config_format=json"] = answers({"vllm_config": config})
        self.answer["/collective_rpc"] = answers({"results": [{"ok": True, "broken": None}]})

    async def _script(self, exchange: Exchange) -> None:
        path, _, query = exchange.request.path.partition("?")
        tags = {part.removeprefix("tags=") for part in query.split("&") if part.startswith("tags=")}
        if path in ("/pause", "/resume", "/sleep", "/wake_up", "/release_kv_cache_memory"):
            self.calls.append(exchange.request.path)
        if exchange.request.path in self.answer:
            await self.answer[exchange.request.path](exchange)
        elif path in ("/pause", "/resume"):
            await answers({})(exchange)
        elif path == "/sleep":
            self.asleep = {"weights", "kv_cache"}
            await answers({"status": "sleeping", "level": 1})(exchange)
        elif path == "/release_kv_cache_memory":
            self.asleep.add("kv_cache")
            await answers({"status": "kv_cache_released"})(exchange)
        elif path == "/wake_up":
            if tags <= self.asleep:
                self.asleep -= tags or self.asleep
            await answers({"status": "sleeping" if self.asleep else "awake", "tags": None})(exchange)
        else:
            await super()._script(exchange)


async def waits(sidecar: RunningSidecar) -> asyncio.Task[Any]:
    """A request, once it waits at the gate."""
    asked = asyncio.create_task(sidecar.generate())
    while await sidecar.total() < 1:
        pass
    assert not asked.done()
    return asked


RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
WEIGHTS, CACHE = {"tags": ["weights"]}, {"tags": ["kv_cache"]}
BOTH: dict[str, Any] = {"tags": None}


@pytest.mark.parametrize(
    ("released", "resumed"),
    [
        ([BOTH], [BOTH]),
        ([{}], [WEIGHTS, CACHE]),
        ([BOTH], [CACHE, WEIGHTS]),
        ([WEIGHTS], [WEIGHTS]),
        ([WEIGHTS], [BOTH]),
        ([CACHE], [CACHE]),
        ([CACHE], [BOTH]),
        ([CACHE], [WEIGHTS, CACHE]),
        ([CACHE, WEIGHTS], [WEIGHTS, CACHE]),
        ([WEIGHTS, CACHE], [BOTH]),
        ([BOTH, BOTH], [BOTH, BOTH]),
    ],
)
async def test_requests_wait_until_all_memory_is_back(
    released: list[dict[str, Any]], resumed: list[dict[str, Any]]
) -> None:
    async with sidecar_and(SleepingVllm()) as (sidecar, vllm):
        for body in released:
            assert await sidecar.post(RELEASE, body) == (200, None)
        assert vllm.asleep
        waiting = await waits(sidecar)
        assert (await sidecar.post("/continue_generation"))[0] == 200
        *partly, wholly = resumed
        for body in partly:
            left = vllm.asleep - {*(body["tags"] or ("weights", "kv_cache"))}
            assert await sidecar.total() == 1
            assert await sidecar.post(RESUME, body) == (200, None)
            assert vllm.asleep == left
        assert await sidecar.post(RESUME, wholly) == (200, None)
        assert not vllm.asleep
        assert (await waiting)[0] == 200


async def test_a_pause_by_hand_outlasts_a_release() -> None:
    async with sidecar_and(SleepingVllm()) as (sidecar, vllm):
        await sidecar.post("/pause_generation")
        await sidecar.post(RELEASE, {})
        await sidecar.post(RESUME, {})
        waiting = await waits(sidecar)
        assert "/resume" not in vllm.calls
        await sidecar.post("/continue_generation")
        assert (await waiting)[0] == 200


async def test_requests_in_flight_refuse_a_release_and_go_on() -> None:
    vllm, end = SleepingVllm(), asyncio.Event()
    script = steps(end, answers(completion(choice([8]))))
    vllm.complete = script
    async with sidecar_before(vllm) as sidecar:
        asked = asyncio.create_task(sidecar.generate())
        await until(lambda: bool(vllm.bodies))
        status, answer = await sidecar.post(RELEASE, {})
        assert (status, answer["success"]) == (400, False)
        assert "1 requests are in flight" in answer["message"]
        await sidecar.post("/pause_generation", {"mode": "in_place"})
        assert (await sidecar.post(RELEASE, {}))[0] == 400
        assert await sidecar.post(RESUME, {}) == (200, None)  # vLLM is not asked: it would continue what is frozen
        assert vllm.calls == ["/pause?mode=keep&clear_cache=false"]
        await sidecar.post("/continue_generation")
        end.set()
        assert (await asked)[0] == 200


@pytest.mark.parametrize(
    ("body", "failing"), [(BOTH, "/sleep?level=1&mode=abort"), (CACHE, "/release_kv_cache_memory")]
)
async def test_a_release_that_fails_leaves_vllm_serving(body: dict[str, Any], failing: str) -> None:
    vllm = SleepingVllm()

    async def fail(exchange: Exchange) -> None:
        vllm.asleep = {"kv_cache"}  # as vLLM's executor does also when its workers fail
        await answers({"error": {"message": "not supported"}}, "500 Internal Server Error")(exchange)

    vllm.answer[failing] = fail
    async with sidecar_before(vllm) as sidecar:
        status, answer = await sidecar.post(RELEASE, body)
        assert (status, "not supported" in answer["message"]) == (400, True)
        assert (await sidecar.generate())[0] == 200
        if body == CACHE:
            assert not vllm.asleep


async def test_weights_that_are_away_are_neither_read_nor_written() -> None:
    async with sidecar_and(SleepingVllm()) as (sidecar, vllm):
        for body, refused in ((WEIGHTS, True), (CACHE, False)):
            await sidecar.post(RELEASE, body)
            for path, asked in (
                ("/update_weights_from_disk", {"model_path": "/x"}),
                ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}),
                ("/weights_checker", {"action": "checksum"}),
                ("/weights_checker", {"action": "reset_tensors"}),
                ("/get_weights_by_name", {"name": "a"}),
            ):
                _, answer = await sidecar.post(path, asked)
                message = answer["message"] if isinstance(answer, dict) else ""
                assert (RESUME in message) == refused, path
                if not refused:
                    break  # the fake has no more
            await sidecar.post(RESUME, body)


async def test_memory_that_vllm_cannot_free_is_a_501_and_tags_are_checked() -> None:
    async with sidecar_and(SleepingVllm(sleep_mode=False)) as (sidecar, vllm):
        status, answer = await sidecar.post(RELEASE, {})
        assert (status, "--enable-sleep-mode" in answer["message"]) == (501, True)
        for tags in ("weights", [], ["cuda_graph"], 1):
            for path in (RELEASE, RESUME):
                status, answer = await sidecar.post(path, {"tags": tags})
                assert (status, answer["message"].startswith("tags:")) == (400, True)
        assert vllm.calls == []
    async with sidecar_and(SleepingVllm(sleep_mode=False, device="cpu")) as (sidecar, vllm):
        for body in (CACHE, WEIGHTS):
            assert await sidecar.post(RELEASE, body) == (200, None)
        assert vllm.calls == ["/pause?mode=keep&clear_cache=false", "/sleep?level=1&mode=abort"]


async def test_adapters_are_loaded_and_listed() -> None:
    vllm = FakeVllm(answers({}))
    asked: list[dict[str, Any]] = []

    async def load(exchange: Exchange) -> None:
        asked.append(json.loads(exchange.request.body))
        await exchange.answer(b"Success: LoRA adapter 'a' added successfully.", headers=("content-type: text/plain",))

    base = {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 100}
    models = {"data": [base, {"id": "a", "root": "/a", "parent": "tiny"}]}
    vllm.answer |= {"/v1/load_lora_adapter": load, "/v1/models": answers(models)}
    async with sidecar_before(vllm) as sidecar:
        body = {"lora_name": "a", "lora_path": "/a", "pinned": True}
        done = {"success": True, "error_message": "", "loaded_adapters": {"a": "/a"}}
        assert await sidecar.post("/load_lora_adapter", body) == (200, done)
        assert asked == [{"lora_name": "a", "lora_path": "/a"}]
        words = {"error": {"message": "The lora adapter 'b' cannot be found.", "code": 404}}
        vllm.answer["/v1/unload_lora_adapter"] = answers(words, "404 Not Found")
        status, answer = await sidecar.post("/unload_lora_adapter", {"lora_name": "b"})
        assert (status, answer["success"], answer["loaded_adapters"]) == (400, False, {"a": "/a"})
        assert answer["error_message"] == words["error"]["message"]
        for wrong in ({}, {"lora_name": 1}, {"lora_name": "a"}):
            assert (await sidecar.post("/load_lora_adapter", wrong))[0] == 400
        vllm.answer["/v1/load_lora_adapter"] = answers({"detail": "Not Found"}, "404 Not Found")
        status, answer = await sidecar.post("/load_lora_adapter", body)
        assert (status, "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in answer["error"]["message"]) == (501, True)
        vllm.answer["/v1/load_lora_adapter"] = load
        vllm.answer["/v1/models"] = answers({"data": [{"parent": "tiny"}]})
        assert (await sidecar.post("/load_lora_adapter", body))[0] == 502


async def test_a_sidecar_whose_vllm_started_after_an_update_is_not_healthy_until_it_is_updated() -> None:
    """Its placement says so, also before the sidecar has first looked at its vLLM."""
    vllm = SleepingVllm()
    vllm.answer["/health"] = answers({})
    vllm.answer["/collective_rpc"] = answers({"results": [{"ok": True, "broken": None, "job": 1}]})
    async with sidecar_before(vllm) as sidecar:
        updates = sidecar.app.updates
        app: Any = sidecar.app
        routed = PlacementRoute(app, updates, AdminKey(None))
        assert (await _asked(routed, "GET"))["updated"] is False
        assert (await _asked(routed, "POST"))["updated"] is False
        await updates.run()
        assert updates.trouble == FIRST_WEIGHTS
        status, answer = await sidecar.post("/health")
        assert (status, answer["error"]["message"]) == (503, FIRST_WEIGHTS)
        assert (await sidecar.post("/continue_generation"))[0] == 400


async def _asked(app: Any, method: str) -> Any:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 9))
    async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
        return (await client.request(method, PATH)).json()
