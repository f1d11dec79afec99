"""Parameters of the sidecar's own routes count in the query and in the body; none is ignored silently."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from skyrl.inference.sidecar.call import QUERIES
from skyrl.inference.sidecar.in_flight import PauseMode
from tests.component.router_world import running_router
from tests.component.sidecar_world import sidecar_before
from tests.component.updated_vllm import DISK, GROUP, Trainer, UpdatedVllm, in_flight

WITHOUT = {
    *("/health", "/health_generate", "/v1/loads", "/get_load", "/server_info", "/get_server_info", "/model_info"),
    *("/get_model_info", "/weight_version", "/get_weight_version", "/remove_worker", "/metrics", "/generate"),
}
"""Own routes without a parameter that changes something."""


@pytest.fixture
def vllm(tmp_path: Path) -> UpdatedVllm:
    return UpdatedVllm(tmp_path / "first")


async def test_every_route_says_what_it_reads_and_refuses_other_parameters(vllm: UpdatedVllm) -> None:
    async with sidecar_before(vllm) as sidecar:
        assert sidecar.app.paths - WITHOUT == QUERIES.keys()
        before = len(vllm.received)
        for path in QUERIES:
            status, answer = await sidecar.post(f"{path}?actoin=compare")
            assert status == 400
            assert answer["error"]["message"] == f"actoin: {path} has no such parameter in its query"
            status, answer = await sidecar.post(path, b"[")
            assert (status, answer["error"]["message"].partition(":")[0]) == (400, "body")
        paths = {one.path for one in vllm.received[before:]}
        assert paths <= {"/is_paused", "/collective_rpc", "/metrics"}, "what the sidecar asks by itself"


@pytest.mark.parametrize("in_query", [False, True])
async def test_the_checker_does_what_it_is_asked(vllm: UpdatedVllm, tmp_path: Path, in_query: bool) -> None:
    async with sidecar_before(vllm) as sidecar:

        async def check(**given: Any) -> tuple[int, Any]:
            if in_query:
                return await sidecar.post(f"/weights_checker?{urlencode(given)}")
            return await sidecar.post("/weights_checker", given)

        assert "payload" in (await check())[1]
        assert (await check(action="snapshot"))[0] == 200
        assert (await check(action="compare"))[0] == 200
        assert (await Trainer("memory", sidecar, vllm, tmp_path).update(2.0))[0] == 200
        status, answer = await check(action="compare")
        assert (status, "differ" in answer["message"]) == (400, True)
        for wrong, field in (
            ({"action": "nonsense"}, "action"),
            ({"action": ""}, "action"),
            ({"selector": "draft"}, "selector"),
            ({"skip_tensor_list": "a"}, "skip_tensor_list"),
        ):
            status, answer = await check(**wrong)
            assert (status, answer["message"].partition(":")[0]) == (400, field)


async def test_two_values_for_one_parameter_are_refused(vllm: UpdatedVllm) -> None:
    async with sidecar_before(vllm) as sidecar:
        assert (await sidecar.post("/pause_generation?mode=retract", {"mode": "retract"}))[0] == 200
        for path, body in (
            ("/weights_checker?action=compare", {"action": "checksum"}),
            ("/pause_generation?mode=abort&mode=retract", {}),
            ("/abort_request?abort_all=true", {"abort_all": False}),
            ("/get_weights_by_name?name=a&truncate_size=1", {"truncate_size": 2}),
        ):
            assert (await sidecar.post(path, body))[0] == 400, path
        for path in ("/abort_request?abort_all=maybe", "/flush_cache?timeout=soon", "/flush_cache?timeout=nan"):
            assert (await sidecar.post(path))[0] == 400, path


async def test_a_query_pauses_aborts_names_and_reads_as_a_body_does(vllm: UpdatedVllm) -> None:
    async with sidecar_before(vllm) as sidecar:
        assert (await sidecar.post("/pause_generation?mode=in_place"))[0] == 200
        assert sidecar.app.pause.mode is PauseMode.IN_PLACE
        assert (await sidecar.post("/continue_generation"))[0] == 200
        assert (await sidecar.post("/update_weight_version?new_version=8&abort_all_requests=false"))[0] == 200
        assert vllm.version == "8"
        status, rows = await sidecar.post("/get_weights_by_name?name=embed_tokens.weight&truncate_size=2")
        assert (status, len(rows)) == (200, 2)
        asked = [await in_flight(sidecar, vllm) for _ in range(2)]
        assert (await sidecar.post("/flush_cache", {"timeout": 0.01}))[0] == 400
        assert (await sidecar.post("/abort_request?rid=other"))[0] == 200
        assert vllm.aborted == []
        assert (await sidecar.post("/abort_request?abort_all=true"))[0] == 200
        async with asyncio.timeout(20):
            while not vllm.aborted:  # noqa: ASYNC110 - the fake sets no event
                await asyncio.sleep(0.01)
        vllm.end.set()
        await asyncio.gather(*asked)


async def test_a_query_updates_as_a_body_does(vllm: UpdatedVllm, tmp_path: Path) -> None:
    async with sidecar_before(vllm) as sidecar:
        await Trainer("disk", sidecar, vllm, tmp_path / "new").stage(3.0)
        given = {"model_path": str(tmp_path / "new"), "weight_version": 17, "keep_pause": "true"}
        status, answer = await sidecar.post(f"{DISK}?{urlencode(given)}")
        assert (status, vllm.version, vllm.first) == (200, "17", 3.0), answer
        assert sidecar.app.pause.mode is PauseMode.IN_PLACE
        group = {"master_address": "here", "master_port": "1", "rank_offset": 1, "world_size": 2, "group_name": "g"}
        assert (await sidecar.post(f"/init_weights_update_group?{urlencode(group)}"))[0] == 200
        assert vllm.receiver.state()["groups"] == ["g"]
        status, answer = await sidecar.post(f"{GROUP}?names=a&dtypes=float32", {"shapes": [[1]]})
        assert (status, answer["message"].partition(":")[0]) == (400, "names")
        assert (await sidecar.post("/destroy_weights_update_group?group_name=g"))[0] == 200
        assert "selector" in (await sidecar.post(f"{DISK}?selector=draft&model_path=/a"))[1]["message"]


async def test_the_router_passes_a_query_on(vllm: UpdatedVllm) -> None:
    async with sidecar_before(vllm) as sidecar, running_router() as router:
        await router.session.post(f"{router.url}/add_worker", json={"url": sidecar.url})
        for query, status in (
            ("action=snapshot", 200),
            ("action=compare", 200),
            ("action=nonsense", 400),
            ("a=1", 400),
        ):
            async with router.session.post(f"{router.url}/weights_checker?{query}") as answer:
                assert answer.status == status, await answer.text()
        async with router.session.post(f"{router.url}/pause_generation?mode=retract") as answer:
            assert answer.status == 200
        assert sidecar.app.pause.mode is PauseMode.RETRACT
