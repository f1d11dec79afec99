"""The media of new weights on real vLLMs, and the example that pushes with samples in flight."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.weights.changes_on_disk import ChangesOnDisk
from skyrl.weights.disk import CheckpointOnDisk
from skyrl.weights.group import TrainerGroup
from skyrl.weights.protocol import publish
from skyrl.weights.shared_memory import SharedMemory
from skyrl.weights.tensors import Part, in_buckets
from skyrl.weights.workers import Workers
from tests.plane.running import RunningPlane
from tests.plane.trainer import Reference
from tests.plane.workers import Worker, computed, tensors_of
from tests.sdk_programs import TRACED, succeeded
from tests.weight_media import World, check

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "push_weights.py"
PROMPT = [265, 296, 83, 315]


@pytest.mark.parametrize(
    "medium", [pytest.param("disk", marks=pytest.mark.slow), pytest.param("group", marks=pytest.mark.slow), "memory"]
)
async def test_full_weights_keep_the_promises_of_a_medium(
    plane: RunningPlane,
    workers: list[Worker],
    variants: list[Path],
    references: list[Reference],
    medium: str,
    tmp_path: Path,
) -> None:
    servers = await Workers.behind(plane.url)
    assert set(servers.urls) == {worker.url for worker in workers}
    media: dict[str, Any] = {
        "disk": CheckpointOnDisk(servers, tmp_path),
        "group": TrainerGroup(servers, timeout_s=30, checksums=True),
        "memory": SharedMemory(servers),
    }

    def parts(version: str) -> list[Part]:
        return list(in_buckets(tensors_of(variants[int(version) % 2]).items(), most_bytes=2**20))

    def wrong(version: str) -> list[Part]:
        return [*parts(version)[:-1], {"model.norm.weight": torch.zeros(3)}]

    async def served() -> list[list[str]]:
        return [[await worker.version()] for worker in workers]

    running = await computed(workers, 1, lambda worker: worker.sample(PROMPT, 500))
    await check(World(media[medium], ("1", "2", "3"), parts, wrong, served))
    for sample in await asyncio.gather(*running):
        assert len(sample["output_ids"]) == 500
    assert os.listdir(tmp_path) == []
    for worker in workers:
        wanted = references[2].logprobs(PROMPT)
        assert max(abs(a - b) for a, b in zip(await worker.logprobs(PROMPT), wanted, strict=True)) < 1e-5


async def test_changes_make_the_same_model_as_a_whole_update(
    workers: list[Worker], variants: list[Path], tmp_path: Path
) -> None:
    """Bit for bit, as the checksums of vLLM's own tensors say."""
    first, second = (Workers([worker.url]) for worker in workers)
    tensors = tensors_of(variants[0])
    medium = ChangesOnDisk(first, tmp_path, checksums=True)
    await publish(medium, "1", in_buckets(tensors.items(), torch.bfloat16))
    whole = medium.sent_bytes
    for tensor in tensors.values():
        tensor.view(-1)[::97] += 0.25
    await publish(medium, "2", in_buckets(tensors.items(), torch.bfloat16))
    assert medium.sent_bytes < whole / 10
    await publish(CheckpointOnDisk(second, tmp_path), "2", in_buckets(tensors.items(), torch.bfloat16))
    sums = [await worker.done("/weights_checker") for worker in workers]
    assert sums[0]["payload"][0]["per_gpu_checksum"] == sums[1]["payload"][0]["per_gpu_checksum"]


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e5m2fnuz], ids=str)
async def test_floats_that_gloo_cannot_carry_reach_the_model(
    dtype: torch.dtype, workers: list[Worker], variants: list[Path], tmp_path: Path
) -> None:
    worker, servers = workers[0], Workers([workers[0].url])
    part = {name: tensor.abs().clamp(min=2**-6).to(dtype) for name, tensor in tensors_of(variants[0]).items()}
    await publish(TrainerGroup(servers, timeout_s=30, checksums=True), "1", [part])
    rows = await worker.done("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 4})
    assert rows == part["model.norm.weight"][:4].float().tolist()
    by_group = await worker.checksum()
    await publish(CheckpointOnDisk(servers, tmp_path), "2", [part])
    assert (await worker.version(), await worker.checksum()) == ("2", by_group)


async def test_the_router_forms_one_group_and_updates_all(
    plane: RunningPlane, workers: list[Worker], variants: list[Path]
) -> None:
    """A trainer that knows the router alone: each server gets ranks of its own."""
    through = Workers([plane.url])
    await workers[0].load_from(variants[0], "1")
    status, answer = await Worker(plane.url, workers[0].session).post("/model_info")
    assert (status, answer["detail"]["message"]) == (409, "mixed worker weight_version")
    await through.post("/update_weights_from_disk", {"model_path": str(variants[0]), "weight_version": "1"})
    assert (await through.versions())[plane.url] == "1"
    assert (await through.post("/weights_checker"))[plane.url]["payload"][0]["per_gpu_checksum"]


@pytest.mark.slow
def test_the_example_pushes_with_samples_in_flight(plane: RunningPlane, workers: list[Worker]) -> None:
    command = [sys.executable, str(EXAMPLE), "--router-url", plane.url, "--steps", "2"]
    done = subprocess.run(command, env=os.environ | TRACED, capture_output=True, text=True, timeout=400, check=False)
    assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stderr}"
    steps = re.findall(r"(disk|gloo) ([\d.]+) s, 8 samples finished, (\d+) of them with both weights", done.stdout)
    assert [medium for medium, _, _ in steps] == ["disk", "gloo"]
    assert any(int(both) for _, _, both in steps), done.stdout
