"""The weights of a sampling session: adapters, whose missing files are fetched, and full weights, which are refused."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import World, world_in
from engine_harness import files_in
from fake_upstream import FakeUpstream
from sqlalchemy import update

from skyrl.api.access import tenant_of_key
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion, FullWeights
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.futures import Outcome

FULL = FullWeights("step-7")
REFUSAL = "version 'step-7' of the full weights cannot be sampled from"


@pytest.fixture
async def world(tmp_path: Path, upstream: FakeUpstream) -> AsyncIterator[World]:
    async with world_in(tmp_path / "state", external_inference_url=upstream.url) as world:
        yield world


def sample_request(sampler: str, seq_id: int = 1) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    return {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": {"max_tokens": 2}}


async def sampled(world: World, sampler: str, seq_id: int = 1) -> Outcome:
    promise = await world.post("asample", sample_request(sampler, seq_id))
    outcome = await world.services.futures.wait(promise["request_id"], tenant_of_key("tml-one"), 60.0)
    assert outcome is not None
    return outcome


async def sampler_on(world: World, path: str) -> str:
    wanted = {"session_id": await world.session(), "sampling_session_seq_id": 0, "model_path": path}
    return (await world.post("create_sampling_session", wanted))["sampling_session_id"]


async def test_an_adapter_missing_in_vllm_and_on_disk_is_fetched_for_a_sample(
    world: World, upstream: FakeUpstream
) -> None:
    trainer = await world.trainer()
    path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="kept"))["path"]
    sampler = await sampler_on(world, path)
    directory = world.harness.adapter(AdapterVersion.of(trainer.model_id, 1))
    files = files_in(directory)
    shutil.rmtree(world.harness.config.adapters_dir)
    upstream.adapters = set()
    assert (await sampled(world, sampler)).error is None
    assert [load.json["lora_path"] for load in upstream.loads] == [str(directory)]
    assert files_in(directory) == files != {}


async def test_samples_fail_if_the_adapters_files_are_lost(world: World, upstream: FakeUpstream) -> None:
    trainer = await world.trainer()
    saved = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    shutil.rmtree(world.harness.config.adapters_dir)
    upstream.adapters = set()
    failed = await sampled(world, saved["sampling_session_id"])
    name = f"{trainer.model_id}@1"
    assert failed.error_category == "server"
    assert failed.error == (
        f"the inference server lost adapter {name} and cannot load it again: the files of adapter {name} are gone"
    )
    assert upstream.loads == []


async def test_full_weights_are_refused_with_a_reason(world: World, upstream: FakeUpstream) -> None:
    trainer, database = await world.trainer(), world.harness.database
    path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="all"))["path"]
    sampler = await sampler_on(world, path)
    world.services.samplers.forget_session(sampler.partition(":")[0])
    for table in (checkpoints, samplers):
        database.write(lambda c, table=table: c.execute(update(table).values(weights=FULL)))
    for route, body, field in (
        (
            "create_sampling_session",
            {"session_id": await world.session(), "sampling_session_seq_id": 1, "model_path": path},
            "model_path",
        ),
        ("asample", sample_request(sampler), "sampling_session_id"),
        ("copy_weights", {"source_path": path, "destination_project_id": "p"}, "source_path"),
    ):
        refused = await world.ask("POST", route, body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["field"] == field
        assert ("full weights" if route == "copy_weights" else REFUSAL) in refused.json()["detail"]
    assert upstream.completions == []
