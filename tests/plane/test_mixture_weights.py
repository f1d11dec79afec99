"""New weights for a mixture of experts in a real vLLM: from disk and over a group, whole and in part, and which experts
are told for the tokens of a sample that gets new weights on its way.

tests/component/inference/test_updated_families.py has the layers of other families.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from skyrl.base.tiny import moe
from tests.plane.running import RunningPlane
from tests.plane.trainer import Reference, save_variant
from tests.plane.workers import Worker, in_buckets, paused_amid, tensors_of, trainer_group

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [265, 296, 83, 315]
EXACT = 5e-5
LAYERS = 3
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    moe.make(directory)
    return directory


@pytest.fixture(scope="module")
def mixture_variants(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("mixture-variants")
    for seed in (1, 2):
        save_variant(mixture, directory / str(seed), seed)
    return [directory / "1", directory / "2"]


@pytest.fixture(scope="module")
def mixture_references(mixture: Path, mixture_variants: list[Path]) -> list[Reference]:
    return [Reference(path, torch.float32) for path in (mixture, *mixture_variants)]


@pytest.fixture(scope="module")
def mixture_plane(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlane]:
    options = {"generator.inference_engine.engine_init_kwargs": {"enable_return_routed_experts": True}}
    flags = ("--base-model", str(mixture), "--backend-config", json.dumps(options))
    running = RunningPlane(tmp_path_factory.mktemp("mixture-plane"), *flags)
    running.start()
    try:
        running.wait_routable(1)
        yield running
    finally:
        running.stop()


@pytest_asyncio.fixture
async def worker(mixture_plane: RunningPlane, mixture: Path, session: Any) -> Any:
    """It has the mixture's own weights."""
    [url] = mixture_plane.sidecars()
    found = Worker(url, session)
    await found.load_from(mixture, "default", abort_all_requests=True)
    await found.done("/continue_generation")
    return found


def furthest(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted)
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True))


async def serves(worker: Worker, reference: Reference, version: str) -> None:
    assert await worker.version() == version
    assert furthest(await worker.logprobs(PROMPT), reference.logprobs(PROMPT)) < EXACT
    sample = await worker.sample(PROMPT, 30)
    sampled = [triple[0] for triple in sample["meta_info"]["output_token_logprobs"]]
    assert furthest(sampled, reference.logprobs(PROMPT + sample["output_ids"])[len(PROMPT) - 1 :]) < EXACT


def record(sample: dict[str, Any]) -> np.ndarray:
    """[tokens - 1, layers, experts per token], the experts of a row in order of their numbers."""
    flat = np.frombuffer(base64.b64decode(sample["meta_info"]["routed_experts"]), "<i4")
    return np.sort(flat.reshape(-1, LAYERS, moe.EXPERTS_PER_TOKEN), axis=-1)


async def recorded(worker: Worker, tokens: int) -> dict[str, Any]:
    return await worker.sample(PROMPT, tokens, return_routed_experts=True)


async def test_all_experts_come_from_disk(
    worker: Worker, mixture_variants: list[Path], mixture_references: list[Reference]
) -> None:
    await serves(worker, mixture_references[0], "default")
    before = await worker.checksum()
    await worker.load_from(mixture_variants[0], "1")
    await serves(worker, mixture_references[1], "1")
    assert await worker.checksum() != before


async def test_all_experts_come_over_a_group(
    worker: Worker, mixture_variants: list[Path], mixture_references: list[Reference]
) -> None:
    async with trainer_group([worker], "mixture") as group:
        await worker.done("/pause_generation")
        applied = []
        for bucket in in_buckets(tensors_of(mixture_variants[1]), 40):
            [(status, answer)] = await group.bucket(bucket, "2")
            assert status == 200
            applied.append(answer["applied"])
        assert applied == [False] * (len(applied) - 1) + [True]
        await worker.done("/continue_generation")
    await serves(worker, mixture_references[2], "2")


async def test_one_expert_is_replaced(
    worker: Worker, mixture: Path, mixture_variants: list[Path], tmp_path: Path
) -> None:
    new = tensors_of(mixture_variants[0])
    save_file({EXPERT: new[EXPERT]}, tmp_path / "model.safetensors")
    await worker.load_from(tmp_path, "part", partial=True)
    whole = tmp_path / "whole"
    save_variant(mixture, whole, 1)
    kept = {name: tensor.float() for name, tensor in tensors_of(mixture).items()} | {EXPERT: new[EXPERT]}
    save_file(kept, whole / "model.safetensors", {"format": "pt"})
    await serves(worker, Reference(whole, torch.float32), "part")
    status, shown = await worker.post("/get_weights_by_name", {"name": EXPERT, "truncate_size": 2})
    assert (status, shown) == (200, new[EXPERT][:2].tolist())


async def test_an_update_that_does_not_fit_changes_nothing(
    worker: Worker, mixture_variants: list[Path], mixture_references: list[Reference], tmp_path: Path
) -> None:
    new = tensors_of(mixture_variants[0])
    wrong = [
        (new | {EXPERT: new[EXPERT][:-1]}, f"shapes: {EXPERT} has the shape"),
        ({name: tensor for name, tensor in new.items() if name != EXPERT}, f"lacks {EXPERT}"),
        (
            new | {EXPERT.replace(".3.", ".8."): new[EXPERT].clone()},
            "the model has no model.layers.1.mlp.experts.8.up_proj",
        ),
        (new | {EXPERT: torch.full_like(new[EXPERT], torch.nan)}, f"{EXPERT} has a value that is not a finite"),
    ]
    before = await worker.checksum()
    for tensors, message in wrong:
        save_file(tensors, tmp_path / "model.safetensors")
        body = {"model_path": str(tmp_path), "weight_version": "wrong"}
        assert message in await worker.refused("/update_weights_from_disk", body)
    assert await worker.checksum() == before
    await serves(worker, mixture_references[0], "default")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_rows_are_those_that_tokens_were_sampled_with(
    worker: Worker, mixture_variants: list[Path], mixture_references: list[Reference], mode: str
) -> None:
    """The row of each token, and the logprob of the next one, belong to the same weights; also the rows of the prompt
    and of tokens that `retract` lets vLLM compute again."""
    tokens = 400
    undisturbed = await recorded(worker, tokens)
    [running] = await paused_amid([worker], 1, lambda worker: recorded(worker, tokens), mode)
    await worker.load_from(mixture_variants[0], "1", flush_cache=mode == "retract")
    await worker.done("/continue_generation")
    sample = await running
    old, new = sample["meta_info"]["weight_versions"]
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], tokens)
    rows, first_new = record(sample), len(PROMPT) + old["end"] - 1
    assert len(rows) == len(PROMPT) + tokens - 1
    assert (rows[:first_new] == record(undisturbed)[:first_new]).all()
    wanted = mixture_references[1].experts(PROMPT + sample["output_ids"], moe.EXPERTS_PER_TOKEN)
    assert (wanted[:first_new] != rows[:first_new]).any(), "the new weights choose other experts"
    if mode == "retract":  # in place, new rows are computed on a cache of the old weights
        assert (rows[first_new:] == wanted[first_new:-1]).all()
        sampled = [triple[0] for triple in sample["meta_info"]["output_token_logprobs"]]
        for span, reference in ((old, mixture_references[0]), (new, mixture_references[1])):
            logprobs = reference.logprobs(PROMPT + sample["output_ids"])[len(PROMPT) - 1 :]
            assert furthest(sampled[span["start"] : span["end"]], logprobs[span["start"] : span["end"]]) < EXACT
