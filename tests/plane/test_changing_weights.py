"""New weights for two real vLLMs while they serve: the sequences of calls that RL frameworks make, and what is promised
to samples in flight.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plane.running import RunningPlane
from tests.plane.trainer import Reference
from tests.plane.workers import (
    ENDLESS,
    Worker,
    computed,
    in_buckets,
    paused_amid,
    tensors_of,
    trainer_group,
    until_computing,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [265, 296, 83, 315]
LONG_PROMPT = PROMPT * 75
"""Two whole blocks of vLLM's prefix cache."""
TOKENS = 300
EXACT = 5e-5
"""Rounding in float32 is up to 1.2e-5 after 400 tokens. Tokens on a cache of the old weights are off by more than 1."""


def furthest(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted)
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True))


async def serves(worker: Worker, reference: Reference, version: str) -> None:
    """The worker's logprobs are the reference's, of a prompt and of what it samples after it."""
    assert await worker.version() == version
    for prompt in (PROMPT, LONG_PROMPT):
        assert furthest(await worker.logprobs(prompt), reference.logprobs(prompt)) < EXACT
        sample = await worker.sample(prompt, 8)
        sampled = [triple[0] for triple in sample["meta_info"]["output_token_logprobs"]]
        assert furthest(sampled, reference.logprobs(prompt + sample["output_ids"])[len(prompt) - 1 :]) < EXACT
        assert sample["meta_info"]["weight_version"] == version


async def test_slimes_update_from_disk(
    workers: list[Worker], variants: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    for worker in workers:
        await serves(worker, references[0], "default")
        await worker.done("/pause_generation")
        assert (await worker.get("/flush_cache"))[0] == 200
    for number, worker in enumerate(workers):
        directory = tmp_path / f"weight_v{number}"
        shutil.copytree(variants[0], directory)
        answer = await worker.load_from(directory, "1")
        shutil.rmtree(directory)
        assert answer["message"].endswith("Weight version updated to 1.")
        assert answer["num_paused_requests"] == 0
    for worker in workers:
        assert await worker.done("/get_weight_version") == {"weight_version": "1"}
        assert await worker.done("/continue_generation") == {
            "message": "Generation continued successfully.",
            "status": "ok",
        }
        await serves(worker, references[1], "1")
    assert len({await worker.checksum() for worker in workers}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_slimes_update_over_a_group(
    workers: list[Worker], variants: list[Path], references: list[Reference], dtype: torch.dtype
) -> None:
    async with trainer_group(workers, "slime-pp_0") as group:
        for version, number in (("1", 0), ("2", 1)):
            for worker in workers:
                await worker.done("/pause_generation")
                assert (await worker.get("/flush_cache"))[0] == 200
            tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(variants[number]).items()}
            applied = []
            for bucket in in_buckets(tensors, 10):
                answers = await group.bucket(bucket, version)
                assert [status for status, _ in answers] == [200, 200]
                applied.append([answer["applied"] for _, answer in answers])
            assert applied == [[False, False]] * 3 + [[True, True]]
            for worker in workers:
                await worker.done("/continue_generation")
                if dtype == torch.float32:
                    await serves(worker, references[1 + number], version)
                assert await worker.version() == version
    assert len({await worker.checksum() for worker in workers}) == 1


async def test_the_same_calls_at_the_router_update_all_workers(
    plane: RunningPlane, workers: list[Worker], variants: list[Path], references: list[Reference]
) -> None:
    """slime's update from disk, then AReaL's, then slime's over a group, by a trainer that knows the router alone."""
    router = Worker(plane.url, workers[0].session)
    await router.done("/pause_generation")
    assert (await router.get("/flush_cache"))[0] == 200
    assert (await router.load_from(variants[0], "1"))["weight_version"] == "1"
    assert await router.done("/get_weight_version") == {"weight_version": "1"}
    await router.done("/continue_generation")
    await serves(router, references[1], "1")
    running = [asyncio.create_task(router.sample(PROMPT, ENDLESS)) for _ in range(4)]
    await until_computing(workers, 2)
    await router.done("/pause_generation")
    assert {(await sample)["meta_info"]["finish_reason"]["type"] for sample in running} == {"abort"}
    await router.load_from(variants[1], "2", abort_all_requests=True)
    await router.done("/continue_generation")
    await serves(router, references[2], "2")
    async with trainer_group([router], "through-router", members=3) as group:
        await router.done("/pause_generation")
        assert (await router.get("/flush_cache"))[0] == 200
        applied = []
        for bucket in in_buckets(tensors_of(variants[0]), 10):
            [(status, answer)] = await group.bucket(bucket, "3")
            assert status == 200
            applied.append(answer["applied"])
        assert applied == [False] * 3 + [True]
        await router.done("/continue_generation")
    for one in (router, *workers):
        await serves(one, references[1], "3")


async def test_areals_updates(workers: list[Worker], variants: list[Path], references: list[Reference]) -> None:
    """Its port is a string, it gives the rank of a pipeline, it aborts what runs, and it names no version: the version
    goes up by itself."""
    worker = workers[0]
    running = await computed([worker], 3, lambda worker: worker.sample(PROMPT, ENDLESS))
    await worker.done("/pause_generation")
    for sample in await asyncio.gather(*running):
        assert sample["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(sample["output_ids"]) < ENDLESS
    await worker.done("/update_weights_from_disk", {"model_path": str(variants[0]), "abort_all_requests": True})
    await worker.done("/continue_generation")
    await serves(worker, references[1], "1")
    async with trainer_group([worker], "update_weight_group_0", pp_rank=0) as group:
        await worker.done("/pause_generation")
        [(status, answer)] = await group.bucket(tensors_of(variants[1]), None, abort_all_requests=True)
        assert (status, answer["applied"], answer["weight_version"]) == (200, True, "2")
        await worker.done("/continue_generation")
    await serves(worker, references[2], "2")


async def test_samples_frozen_in_place_go_on_with_the_new_weights(
    workers: list[Worker], variants: list[Path], references: list[Reference]
) -> None:
    """Greedy samples follow the old model up to the switch. Each token's version is known. What they leave in the cache
    reaches nobody else."""
    undisturbed = [(await worker.sample(LONG_PROMPT, TOKENS))["output_ids"] for worker in workers]
    assert (await workers[0].sample(LONG_PROMPT, 1))["meta_info"]["cached_tokens"] == len(LONG_PROMPT) - 1
    running = await paused_amid(workers, 2, lambda worker: worker.sample(LONG_PROMPT, TOKENS), "in_place")
    for worker in workers:
        assert (await worker.get("/flush_cache"))[0] == 400
    for worker in workers:
        answer = await worker.load_from(variants[0], "1", flush_cache=False)
        assert answer["num_paused_requests"] == 2
    for worker in workers:
        await worker.done("/continue_generation")
    fresh = await asyncio.gather(*(worker.sample(LONG_PROMPT, 20) for worker in workers))
    for sample in fresh:
        assert sample["meta_info"]["cached_tokens"] == 0
        sampled = [triple[0] for triple in sample["meta_info"]["output_token_logprobs"]]
        wanted = references[1].logprobs(LONG_PROMPT + sample["output_ids"])[len(LONG_PROMPT) - 1 :]
        assert furthest(sampled, wanted) < EXACT
    for number, sample in enumerate(await asyncio.gather(*running)):
        assert sample["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
        old, new = sample["meta_info"]["weight_versions"]
        assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "1", TOKENS)
        assert 0 < old["end"] == new["start"] < TOKENS
        before = undisturbed[number // 2]
        assert sample["output_ids"][: old["end"]] == before[: old["end"]]
        assert sample["output_ids"] != before
        assert sample["meta_info"]["weight_version"] == "1"
    for worker in workers:
        await serves(worker, references[1], "1")


async def test_a_chat_that_gets_new_weights_tells_which_tokens_are_whose(
    workers: list[Worker], variants: list[Path]
) -> None:
    worker = workers[0]
    chat = {"messages": [], "input_ids": PROMPT, "return_meta_info": True, "logprobs": True, "temperature": 0}
    asked = chat | {"max_tokens": 400, "ignore_eos": True}

    async def sample(worker: Worker) -> dict[str, Any]:
        return (await worker.done("/v1/chat/completions", asked))["choices"][0]["meta_info"]

    [running] = await paused_amid([worker], 1, sample, "in_place")
    await worker.load_from(variants[0], "1", flush_cache=False)
    await worker.done("/continue_generation")
    meta = await running
    old, new = meta["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "1", 400)
    assert 0 < old["end"] == new["start"] < 400
    assert (meta["weight_version"], meta["completion_tokens"]) == ("1", 400)


async def test_retracted_samples_compute_their_cache_again(
    workers: list[Worker], variants: list[Path], references: list[Reference]
) -> None:
    """So every token has exactly the logprob of the model of its version."""
    worker = workers[0]
    [running] = await paused_amid([worker], 1, lambda worker: worker.sample(PROMPT, 400), "retract")
    await worker.load_from(variants[0], "1")
    await worker.done("/continue_generation")
    sample = await running
    old, new = sample["meta_info"]["weight_versions"]
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], 400)
    sampled = [triple[0] for triple in sample["meta_info"]["output_token_logprobs"]]
    for span, reference in ((old, references[0]), (new, references[1])):
        wanted = reference.logprobs(PROMPT + sample["output_ids"])[len(PROMPT) - 1 :]
        assert furthest(sampled[span["start"] : span["end"]], wanted[span["start"] : span["end"]]) < EXACT


async def test_updates_lose_no_sample(workers: list[Worker], variants: list[Path]) -> None:
    lengths = range(20, 180, 20)

    async def sample(worker: Worker, number: int) -> dict[str, Any]:
        return await worker.sample([*PROMPT, number], lengths[number])

    running = [asyncio.create_task(sample(worker, number)) for worker in workers for number in range(len(lengths))]
    versions = [str(number) for number in range(5)]
    answered: list[dict[str, Any]] = []
    for version in versions:
        for worker in workers:
            await worker.done("/pause_generation", {"mode": "in_place"})
        await asyncio.gather(
            *(worker.load_from(variants[int(version) % 2], version, flush_cache=False) for worker in workers)
        )
        for worker in workers:
            await worker.done("/continue_generation")
        ended = [task for task in running if task.done()]
        answered += [task.result() for task in ended]
        running = [task for task in running if not task.done()]
        while len(running) < 2 * len(lengths):
            number = len(running) % len(lengths)
            running.append(asyncio.create_task(sample(workers[len(running) % 2], number)))
    answered += await asyncio.gather(*running)
    spans = 0
    for sample_ in answered:
        count = len(sample_["output_ids"])
        assert count in lengths
        assert sample_["meta_info"]["finish_reason"] == {"type": "length", "length": count}
        parts = sample_["meta_info"]["weight_versions"]
        assert [part["start"] for part in parts] + [count] == [0] + [part["end"] for part in parts]
        assert {part["version"] for part in parts} <= {"default", *versions}
        spans = max(spans, len(parts))
    assert spans > 2
    assert {await worker.version() for worker in workers} == {"4"}


async def test_the_checker_finds_one_bit(workers: list[Worker], variants: list[Path]) -> None:
    """Of the one tensor that differs, and of no other."""
    worker = workers[0]
    await worker.load_from(variants[0], "1")
    before = await worker.checksum()
    await worker.done("/weights_checker", {"action": "snapshot"})
    await worker.done("/weights_checker", {"action": "compare"})
    name = "model.layers.0.self_attn.k_proj.weight"
    tensor = tensors_of(variants[0])[name].clone()
    tensor.view(torch.int32)[3, 5] ^= 1
    async with trainer_group([worker], "one-bit") as group:
        [(status, answer)] = await group.bucket({name: tensor}, "1", partial=True)
        assert (status, answer["applied"]) == (200, True)
    message = await worker.refused("/weights_checker", {"action": "compare"})
    assert message == "1 tensors differ from the snapshot, such as model.layers.0.self_attn.qkv_proj.weight"
    assert await worker.checksum() != before
    rows = await worker.done("/get_weights_by_name", {"name": name, "truncate_size": 4})
    assert torch.equal(torch.tensor(rows), tensor[:4])
    await worker.load_from(variants[0], "1")
    await worker.done("/weights_checker", {"action": "compare"})
    assert await worker.checksum() == before


async def test_an_update_replaces_every_tensor(workers: list[Worker], variants: list[Path]) -> None:
    """The check that frameworks make: overwrite all tensors, update, compare. Until the update nobody is answered."""
    worker = workers[0]
    await worker.load_from(variants[0], "1")
    await worker.done("/weights_checker", {"action": "snapshot"})
    await worker.done("/weights_checker", {"action": "reset_tensors"})
    assert "reset" in await worker.refused("/continue_generation")
    assert (await worker.get("/health"))[0] == 503
    waiting = asyncio.create_task(worker.sample(PROMPT, 4))
    assert "differ" in await worker.refused("/weights_checker", {"action": "compare"})
    assert not waiting.done()
    await worker.load_from(variants[0], "1")
    assert (await waiting)["meta_info"]["weight_version"] == "1"
    await worker.done("/weights_checker", {"action": "compare"})
    assert (await worker.get("/health"))[0] == 200


async def test_a_paused_worker_stays_paused_after_an_update(workers: list[Worker], variants: list[Path]) -> None:
    for pause_before, keep_pause, paused in ((True, False, True), (False, True, True), (False, False, False)):
        worker = workers[0]
        if pause_before:
            await worker.done("/pause_generation")
        await worker.load_from(variants[0], "1", keep_pause=keep_pause)
        waiting = asyncio.create_task(worker.sample(PROMPT, 2))
        if paused:
            await worker.done("/weights_checker", {"action": "checksum"})
            assert not waiting.done()
            await worker.done("/continue_generation")
        assert len((await waiting)["output_ids"]) == 2


async def test_a_checkpoint_can_be_read_before_the_pause(
    workers: list[Worker], variants: list[Path], tmp_path: Path
) -> None:
    worker, directory = workers[0], tmp_path / "new"
    shutil.copytree(variants[0], directory)
    [running] = await computed([worker], 1, lambda worker: worker.sample(PROMPT, ENDLESS))
    assert not (await worker.load_from(directory, "1", stage_only=True, flush_cache=False))["applied"]
    assert await worker.version() == "default"
    shutil.rmtree(directory)
    await worker.done("/pause_generation", {"mode": "in_place"})
    assert (await worker.load_from(directory, "1", flush_cache=False))["applied"]
    assert "is not a directory" in await worker.refused(
        "/update_weights_from_disk", {"model_path": str(directory), "weight_version": "1", "flush_cache": False}
    )
    await worker.done("/continue_generation")
    await worker.sample(PROMPT, 4)  # in steps that the other sample takes, too
    await worker.done("/pause_generation")
    assert [span["version"] for span in (await running)["meta_info"]["weight_versions"]] == ["default", "1"]
