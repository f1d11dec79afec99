"""New weights by every medium: what samples in flight make of an update, and how its version is named.

The vLLM is a fake with the worker extension's own calls behind it; tests/plane has real vLLMs.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.inference.sidecar.updates import FIRST_WEIGHTS
from skyrl.inference.vllm_plugin.protocol import INCARNATION
from skyrl.inference.vllm_plugin.weights.receiver import NOT_IN_SERVICE
from tests.component.router_world import HEALTHY, Exchange, running_router
from tests.component.sidecar_world import answers, running_sidecar, sidecar_before
from tests.component.updated_vllm import DISK, GROUP, Trainer, UpdatedVllm, described, in_flight, part_of

MEDIA = ("disk", "group", "memory")
HOLD = "/pause?mode=keep&clear_cache=false"


@pytest.fixture
def vllm(tmp_path: Path) -> UpdatedVllm:
    return UpdatedVllm(tmp_path / "first")


@pytest.mark.parametrize("staged_idle", [False, True])
@pytest.mark.parametrize("medium", MEDIA)
async def test_samples_in_flight_refuse_an_update_by_every_medium(
    medium: str, staged_idle: bool, vllm: UpdatedVllm, tmp_path: Path
) -> None:
    """Also where nothing was in flight while it was staged. The whole update can be sent again."""
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer(medium, sidecar, vllm, tmp_path / "new")
        if staged_idle:
            await trainer.stage(2.0, weight_version="2")
        asked = await in_flight(sidecar, vllm)
        if not staged_idle:
            await trainer.stage(2.0, weight_version="2")
        for fields in ({"flush_cache": False}, {}):
            status, answer = await trainer.apply(2.0, weight_version="2", **fields)
            assert (status, answer["success"]) == (400, False), answer
            assert answer["message"].startswith("1 requests are in flight: set abort_all_requests")
            assert (vllm.version, vllm.first) == ("default", 0.0)
            await trainer.stage(2.0, weight_version="2", **fields)
        vllm.end.set()
        assert (await asked)[0] == 200
        status, answer = await trainer.update(2.0, weight_version="2")
        assert (status, answer["applied"], vllm.version, vllm.first) == (200, True, "2", 2.0)


@pytest.mark.parametrize("medium", MEDIA)
async def test_a_pause_says_what_becomes_of_samples_in_flight(medium: str, vllm: UpdatedVllm, tmp_path: Path) -> None:
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer(medium, sidecar, vllm, tmp_path / "new")
        asked = await in_flight(sidecar, vllm)
        for value, mode, flush_cache, flushes in (
            (1.0, "in_place", True, None),
            (2.0, "in_place", False, []),
            (3.0, "retract", True, ["reset_running_requests=true"]),
        ):
            await sidecar.post("/pause_generation", {"mode": mode})
            before, vllm.flushed = vllm.first, []
            status, answer = await trainer.update(value, flush_cache=flush_cache)
            refused = flushes is None
            assert status == (400 if refused else 200), answer
            assert vllm.first == (before if refused else value)
            assert vllm.flushed == (flushes or [])
            assert refused or answer["num_paused_requests"] == 1
            assert (await sidecar.post("/continue_generation"))[0] == 200
        vllm.end.set()
        assert (await asked)[0] == 200


async def test_samples_that_a_failed_update_has_frozen_compute_their_cache_again(
    vllm: UpdatedVllm, tmp_path: Path
) -> None:
    """Also where the next update, as some trainers' buckets, says that no cache is to be flushed."""
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer("group", sidecar, vllm, tmp_path / "new")
        asked = await in_flight(sidecar, vllm)
        assert (await sidecar.post("/weights_checker", {"action": "reset_tensors"}))[0] == 200
        status, answer = await trainer.update(3.0, flush_cache=False)
        assert (status, vllm.first) == (200, 3.0), answer
        assert vllm.flushed == ["reset_running_requests=true"]
        vllm.end.set()
        assert (await asked)[0] == 200


@pytest.mark.parametrize("path", [DISK, GROUP])
async def test_through_the_router_as_at_a_sidecar(path: str, tmp_path: Path) -> None:
    one, other = UpdatedVllm(tmp_path / "one"), UpdatedVllm(tmp_path / "other")
    async with sidecar_before(one) as first, sidecar_before(other) as second, running_router() as router:
        for sidecar in (first, second):
            await router.session.post(f"{router.url}/add_worker", json={"url": sidecar.url})
        body: dict[str, Any] = {"model_path": str(tmp_path / "one"), "weight_version": 2}
        if path == GROUP:
            for sidecar, vllm in ((first, one), (second, other)):
                await Trainer("group", sidecar, vllm, tmp_path)._join()
                vllm.group.sent += part_of(2.0).values()
            body = described(part_of(2.0)) | {"weight_version": 2}
        asked = [await in_flight(first, one), await in_flight(second, other)]
        async with router.session.post(router.url + path, json=body) as answer:
            refused = await answer.json()
            assert answer.status == 400, refused
        assert refused["message"].startswith("1 requests are in flight")
        for vllm in (one, other):
            assert (vllm.version, vllm.first) == ("default", 0.0)
            vllm.end.set()
        assert [(await task)[0] for task in asked] == [200, 200]


async def test_an_update_without_a_version_is_told_from_the_one_before(vllm: UpdatedVllm, tmp_path: Path) -> None:
    async with sidecar_before(vllm) as sidecar:
        found = []
        for medium in MEDIA:
            trainer = Trainer(medium, sidecar, vllm, tmp_path / "new")
            for version in (None, None, 7, None, "step-7", None, None, "default"):
                status, answer = await trainer.update(1.0, weight_version=version)
                assert status == 200, answer
                assert answer["message"].endswith(f"Weight version updated to {vllm.version}.")
                assert answer["weight_version"] == vllm.version
                found.append(vllm.version)
        assert found == ["1", "2", "7", "8", "step-7", "step-7+1", "step-7+2", "default"] * 3


async def test_a_part_of_an_update_moves_no_version(vllm: UpdatedVllm, tmp_path: Path) -> None:
    async with sidecar_before(vllm) as sidecar:
        for medium in MEDIA:
            trainer, before = Trainer(medium, sidecar, vllm, tmp_path / "new"), vllm.version
            await trainer.stage(1.0)
            assert vllm.version == before
            await trainer.apply(1.0)
        assert vllm.version == "3"
        part = {"partial": True}
        assert (await Trainer("group", sidecar, vllm, tmp_path)._bucket(part_of(1.0, last=True), **part))[0] == 200
        assert vllm.version == "4"


async def test_versions_go_on_after_vllm_was_started_again(vllm: UpdatedVllm, tmp_path: Path) -> None:
    """It then says `default`. Its next weights must not be named as earlier ones were."""
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer("disk", sidecar, vllm, tmp_path / "new")
        for _ in range(2):
            assert (await trainer.update(1.0))[0] == 200
        vllm.version = "default"
        assert (await trainer.update(2.0))[1]["weight_version"] == "3"


async def test_a_version_is_a_text_or_a_number(vllm: UpdatedVllm, tmp_path: Path) -> None:
    async with sidecar_before(vllm) as sidecar:
        status, answer = await sidecar.post("/update_weight_version", {"new_version": 12})
        assert (status, answer["new_version"], vllm.version) == (200, "12", "12")
        assert (await sidecar.post("/weight_version"))[1] == {"weight_version": "12"}
        for path, field in ((DISK, "weight_version"), ("/update_weight_version", "new_version")):
            for wrong in (True, 1.5, "", ["1"]):
                status, answer = await sidecar.post(path, {"model_path": str(tmp_path), field: wrong})
                assert (status, answer["message"].partition(":")[0]) == (400, field), answer


async def test_without_a_version_of_vllms_an_update_without_one_is_no_success(
    vllm: UpdatedVllm, tmp_path: Path
) -> None:
    async with sidecar_before(vllm) as sidecar:
        vllm.answer["/weight_info"] = answers({}, "500 Internal Server Error")
        status, answer = await Trainer("disk", sidecar, vllm, tmp_path / "new").update(1.0)
        assert (status, answer["success"]) == (503, False)
        assert (await sidecar.post("/health"))[0] == 200, "the model is as it was"
        assert vllm.first == 0.0


def started(vllm: UpdatedVllm, name: str) -> None:
    vllm.health = HEALTHY.replace(b"\r\n", f"\r\n{INCARNATION}: {name}\r\n".encode(), 1)


async def test_a_vllm_that_was_started_again_is_held_until_an_update_also_if_the_first_hold_fails(
    vllm: UpdatedVllm, tmp_path: Path
) -> None:
    started(vllm, "a")
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer("disk", sidecar, vllm, tmp_path / "new")
        assert (await trainer.update(1.0))[0] == 200
        started(vllm, "b")
        hold = vllm.answer[HOLD]
        vllm.answer[HOLD] = answers({}, "500 Internal Server Error")
        assert (await sidecar.post("/health"))[0] == 503
        vllm.answer[HOLD] = hold
        status, answer = await sidecar.post("/health")
        assert (status, answer["error"]["message"]) == (503, FIRST_WEIGHTS)
        assert (await trainer.update(2.0))[0] == 200
        assert (await sidecar.post("/health"))[0] == 200


async def test_a_look_that_waits_for_an_update_of_a_new_start_does_not_undo_it(
    vllm: UpdatedVllm, tmp_path: Path
) -> None:
    started(vllm, "a")
    async with sidecar_before(vllm) as sidecar:
        trainer, updates = Trainer("disk", sidecar, vllm, tmp_path / "new"), sidecar.app.updates
        assert (await trainer.update(1.0))[0] == 200
        started(vllm, "b")
        async with updates.locked():
            look = asyncio.create_task(updates.see_start("b"))
            await asyncio.sleep(0)
            updates._applying.updated_start = "b"
        await look
        assert (updates.trouble, updates.was_updated) == (None, True)


async def test_weights_that_a_killed_sidecar_has_not_named_are_out_of_service_until_an_update(
    vllm: UpdatedVllm, tmp_path: Path
) -> None:
    """It was killed while vLLM put them into the model, and has left vLLM paused. The next one may be asked to continue
    before it has heard what vLLM has."""
    await vllm.start()
    async with running_sidecar(vllm.url) as killed:
        await Trainer("disk", killed, vllm, tmp_path / "new").stage(2.0, weight_version="2")
    assert vllm.receiver.answer("apply", {"partial": False})["ok"]
    vllm.answer["/is_paused"] = answers({"is_paused": True})
    asked = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        if json.loads(exchange.request.body)["args"][0] == "state":
            await asked.wait()
            await asyncio.sleep(0.1)
        await vllm._call(exchange)

    vllm.answer["/collective_rpc"] = slow
    async with running_sidecar(vllm.url) as sidecar:
        asked.set()
        status, answer = await sidecar.post("/continue_generation")
        assert (status, answer["message"]) == (400, f"generation stays paused: {NOT_IN_SERVICE}")
        status, answer = await sidecar.post("/health")
        assert (status, answer["error"]["message"]) == (503, NOT_IN_SERVICE)
        assert (await Trainer("disk", sidecar, vllm, tmp_path / "new").update(3.0, weight_version="3"))[0] == 200
        assert (await sidecar.post("/health"))[0] == 200
        vllm.end.set()
        assert (await sidecar.generate())[0] == 200, "the pause has ended with the update"
    await vllm.stop()


@pytest.mark.parametrize("failing", ["/update_weight_version", "mark_broken"])
async def test_new_weights_that_cannot_be_put_into_service_stay_out_of_it(
    failing: str, vllm: UpdatedVllm, tmp_path: Path
) -> None:
    fail = answers({"error": "no"}, "500 Internal Server Error")

    async def call(exchange: Exchange) -> None:
        name = json.loads(exchange.request.body)["args"][0]
        await (fail if name == failing else vllm._call)(exchange)

    working = dict(vllm.answer)
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer("disk", sidecar, vllm, tmp_path / "new")
        vllm.answer |= {"/collective_rpc": call} | ({failing: fail} if failing in working else {})
        status, answer = await trainer.update(2.0)
        assert (status, "were not put into service: " in answer["message"]) == (400, True)
        assert (await sidecar.post("/health"))[0] == 503
        assert vllm.receiver.state()["broken"] is not None
        vllm.answer |= working
        assert (await trainer.update(3.0))[0] == 200
        assert ((await sidecar.post("/health"))[0], vllm.receiver.state()["broken"]) == (200, None)


@pytest.mark.parametrize("first", ["sidecar", "vllm", "both"])
async def test_a_sidecar_that_was_started_again_knows_which_start_of_vllm_was_updated(
    first: str, vllm: UpdatedVllm, tmp_path: Path
) -> None:
    """Whichever of the two ends first; and versions go on."""
    known = tmp_path / "known.json"
    started(vllm, "a")
    await vllm.start()
    async with running_sidecar(vllm.url, known_file=known) as sidecar:
        trainer = Trainer("disk", sidecar, vllm, tmp_path / "new")
        assert [(await trainer.update(1.0))[1]["weight_version"] for _ in range(2)] == ["1", "2"]
        if first == "vllm":
            started(vllm, "b")
            assert (await sidecar.post("/health"))[0] == 503
    if first == "both":
        started(vllm, "b")
    async with running_sidecar(vllm.url, known_file=known) as sidecar:
        if first == "sidecar":
            assert (await sidecar.post("/health"))[0] == 200
            started(vllm, "b")
        else:
            assert (await sidecar.post("/continue_generation"))[0] == 400
        vllm.version = "default"
        status, answer = await sidecar.post("/health")
        assert (status, answer["error"]["message"]) == (503, FIRST_WEIGHTS)
        assert (await Trainer("disk", sidecar, vllm, tmp_path / "new").update(2.0))[1]["weight_version"] == "3"
        assert (await sidecar.post("/health"))[0] == 200
    async with running_sidecar(vllm.url, known_file=known) as sidecar:
        await sidecar.app.updates.run()
        assert (await sidecar.post("/health"))[0] == 200
    await vllm.stop()


async def test_an_update_is_no_failure_although_the_disk_is_full(
    vllm: UpdatedVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sidecar_before(vllm, known_file=tmp_path / "no directory" / "known.json") as sidecar:
        assert (await Trainer("disk", sidecar, vllm, tmp_path / "new").update(1.0))[0] == 200
    assert "the next sidecar needs it" in caplog.text


async def test_a_part_of_an_update_does_not_make_first_weights_of_use(vllm: UpdatedVllm, tmp_path: Path) -> None:
    """The rest of the model would be from before the training."""
    started(vllm, "a")
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer("group", sidecar, vllm, tmp_path / "new")
        assert (await trainer.update(1.0))[0] == 200
        started(vllm, "b")
        assert (await sidecar.post("/health"))[0] == 503
        status, answer = await trainer._bucket(part_of(2.0, last=True), partial=True)
        assert (status, "needs all its tensors" in answer["message"]) == (400, True), answer
        assert (await sidecar.post("/health"))[0] == 503
        assert (await trainer.update(2.0))[0] == 200
        assert (await sidecar.post("/health"))[0] == 200
