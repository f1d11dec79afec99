"""What each rank of a vLLM has made of a change of its weights, as the answers tell it, also through a router; and what
becomes of a group whose bucket is refused.

The vLLM is a fake with the worker extension's own calls behind it, for two ranks; tests/plane has real vLLMs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from weight_model import KEY, TinyModel, served, tensors

from skyrl.inference.vllm_plugin.weights.receiver import Receiver
from tests.component.router_world import Exchange, running_router, until
from tests.component.sidecar_world import answers, sidecar_and, sidecar_before
from tests.component.updated_vllm import DISK, GROUP, TENSOR, SentGroup, Trainer, UpdatedVllm, described, part_of

GOOD = {"success": True, "message": "ok", "error": None}
BOTH = [{"rank": 0} | GOOD, {"rank": 1} | GOOD]


class TwoRanks(UpdatedVllm):
    """`second` is the model of the second rank, which gets the same tensors from the trainer."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.second = TinyModel()
        self.other = SentGroup()
        self.ranks = (
            self.receiver,
            Receiver(
                served(self.second, directory),
                lambda **_: self.other,
                torch.device("cpu"),
                {"tp_rank": 1},
                1,
                lambda: None,
            ),
        )

    async def _call(self, exchange: Exchange) -> None:
        name, arguments = json.loads(exchange.request.body)["args"]
        if name == "receive":
            self.other.sent = list(self.group.sent)
        await answers({"results": [rank.answer(name, arguments) for rank in self.ranks]})(exchange)


@pytest.fixture
def vllm(tmp_path: Path) -> TwoRanks:
    return TwoRanks(tmp_path / "first")


@pytest.mark.parametrize("medium", ["disk", "group", "memory"])
async def test_an_update_tells_the_outcome_of_each_rank(medium: str, vllm: TwoRanks, tmp_path: Path) -> None:
    async with sidecar_before(vllm) as sidecar:
        trainer = Trainer(medium, sidecar, vllm, tmp_path / "new")
        if medium == "group":
            await joined(sidecar)
            trainer._joined = True
        status, answer = await trainer.update(2.0, weight_version="2")
        assert (status, answer["applied"], answer["rank_results"]) == (200, True, BOTH)
        assert vllm.second.embed_tokens.weight.detach()[0, 0] == 2.0
        assert [rank.answer("state", {})["broken"] for rank in vllm.ranks] == [None, None]


async def joined(sidecar: Any) -> Any:
    group = {"master_address": "here", "master_port": 1, "rank_offset": 1, "world_size": 3, "backend": "gloo"}
    status, answer = await sidecar.post("/init_weights_update_group", group)
    assert status == 200, answer
    return answer


async def test_a_job_that_only_some_ranks_begin_is_stopped_and_later_ones_run(vllm: TwoRanks, tmp_path: Path) -> None:
    """In a group of two, the second rank has no place."""
    stopped = vllm.receiver._calls["stop"] = Mock(side_effect=vllm.receiver.stop)
    async with sidecar_before(vllm) as sidecar:
        group = {"master_address": "here", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
        status, answer = await sidecar.post("/init_weights_update_group", group)
        assert (status, "rank 1: rank_offset: this rank would be 2" in answer["message"]) == (400, True)
        stopped.assert_called_once_with()
        status, answer = await Trainer("disk", sidecar, vllm, tmp_path / "new").update(2.0, weight_version="2")
        assert (status, answer["rank_results"]) == (200, BOTH)


async def test_all_changes_tell_the_outcome_of_each_rank_also_when_they_change_nothing(
    vllm: TwoRanks, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    save_file(tensors(2.0), tmp_path / "new" / "model.safetensors")
    async with sidecar_before(vllm) as sidecar:
        assert (await joined(sidecar))["rank_results"] == BOTH
        for path, body in (
            ("/destroy_weights_update_group", {}),
            (DISK, {"model_path": str(tmp_path / "new"), "stage_only": True}),
            ("/update_weights_from_tensor", {"discard": True}),
            ("/weights_checker", {"action": "snapshot"}),
            ("/weights_checker", {"action": "compare"}),
            ("/weights_checker", {}),
            ("/weights_checker", {"action": "reset_tensors"}),
        ):
            status, answer = await sidecar.post(path, body)
            assert (status, answer["success"], answer["rank_results"]) == (200, True, BOTH), path


async def test_a_failure_names_the_ranks_that_failed_and_those_that_did_not(vllm: TwoRanks, tmp_path: Path) -> None:
    async with sidecar_before(vllm) as sidecar:
        await sidecar.post("/weights_checker", {"action": "snapshot"})
        with torch.no_grad():
            vllm.second.scale.fill_(7.0)
        status, answer = await sidecar.post("/weights_checker", {"action": "compare"})
        assert (status, answer["rank_results"][0]) == (400, {"rank": 0} | GOOD)
        differs = "1 tensors differ from the snapshot, such as scale"
        assert answer["rank_results"][1] == {"rank": 1, "success": False, "message": differs, "error": differs}
        trainer = Trainer("disk", sidecar, vllm, tmp_path / "new")
        vllm.second.raises_at = KEY
        status, answer = await trainer.update(2.0, weight_version="2")
        first, second = answer["rank_results"]
        assert (status, answer["success"], first) == (400, False, {"rank": 0} | GOOD)
        assert (second["rank"], second["success"]) == (1, False)
        assert second["error"] == second["message"]
        assert "on purpose" in second["error"]
        vllm.second.raises_at = None
        status, answer = await trainer.update(3.0, weight_version="3")
        assert (status, answer["rank_results"]) == (200, BOTH)


async def test_a_routers_answer_has_the_ranks_of_each_worker(vllm: TwoRanks, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    save_file(tensors(2.0), tmp_path / "new" / "model.safetensors")
    async with sidecar_before(vllm) as sidecar, running_router(workers=(sidecar.url,)) as router:
        await until(lambda: router.app.status()["routable"] == 1)
        body = {"model_path": str(tmp_path / "new"), "weight_version": "2"}
        async with router.session.post(router.url + DISK, json=body) as answer:
            (result,) = (await answer.json())["results"]
        assert (answer.status, result["body"]["rank_results"]) == (200, BOTH)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"load_format": "flattened_bucket"}, "load_format: 'flattened_bucket' is not offered"),
        ({"shapes": "x"}, "shapes: must be a list"),
        ({"flush_cache": "no"}, "flush_cache: must be true or false"),
    ],
)
async def test_a_bucket_that_is_refused_unreceived_ends_its_group(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Its trainer sends it at the same time: those tensors would be taken for the next bucket's."""
    async with sidecar_and(UpdatedVllm(tmp_path / "first")) as (sidecar, vllm):
        trainer = Trainer("group", sidecar, vllm, tmp_path / "new")
        await trainer._join()
        vllm.group.sent += part_of(9.0).values()
        status, answer = await sidecar.post(GROUP, described(part_of(9.0)) | wrong)
        assert (status, answer["message"].startswith(words)) == (400, True), answer
        status, answer = await sidecar.post(GROUP, described(part_of(2.0)))
        assert status == 400
        assert f"has failed (a bucket was refused: {words}" in answer["message"]
        assert answer["message"].endswith("form it again")
        assert vllm.first == 0.0


async def test_a_format_of_several_tensors_in_one_is_refused_for_a_trainers_memory(tmp_path: Path) -> None:
    async with sidecar_before(UpdatedVllm(tmp_path / "first")) as sidecar:
        status, answer = await sidecar.post(TENSOR, {"memory": None, "load_format": "flattened_bucket"})
        assert (status, answer["message"].partition(":")[0]) == (400, "load_format")


async def test_a_bucket_that_comes_while_the_weights_memory_is_away_ends_its_group(tmp_path: Path) -> None:
    async with sidecar_and(UpdatedVllm(tmp_path / "first")) as (sidecar, vllm):
        trainer = Trainer("group", sidecar, vllm, tmp_path / "new")
        await trainer._join()
        sidecar.app.updates.weights_away = True
        vllm.group.sent += part_of(9.0).values()
        status, answer = await sidecar.post(GROUP, described(part_of(9.0)))
        assert (status, "call /resume_memory_occupation before" in answer["message"]) == (400, True)
        sidecar.app.updates.weights_away = False
        status, answer = await sidecar.post(GROUP, described(part_of(2.0)))
        assert (status, "form it again" in answer["message"]) == (400, True)
        assert vllm.first == 0.0
