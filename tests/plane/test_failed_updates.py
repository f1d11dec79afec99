"""Updates that fail, on real vLLMs: what the worker serves afterwards, and how it is repaired."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl.base.tiny import model_path
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.supervision import dies_with_parent
from skyrl.weights.shared_memory import SharedMemory
from skyrl.weights.workers import Workers, WorkersFailed
from tests.plane.running import READY_S, RunningPlane
from tests.plane.workers import ENDLESS, Worker, computed, paused_amid, tensors_of, trainer_group

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [265, 296, 83, 315]
NORM = "model.norm.weight"
TIMEOUT_S = 3.0


@contextlib.asynccontextmanager
async def untouched(worker: Worker) -> AsyncIterator[None]:
    """After the body the model, its version and its state are as before, and it samples."""
    before = (await worker.checksum(), await worker.version())
    yield
    assert (await worker.checksum(), await worker.version()) == before
    assert (await worker.get("/health"))[0] == 200
    sample = await worker.sample(PROMPT, 4)
    assert sample["meta_info"]["weight_version"] == before[1]


def changed(directory: Path, source: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with other tensors; None leaves one out."""
    kept = tensors_of(source) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, directory / "model.safetensors")
    return directory


async def test_a_checkpoint_that_does_not_fit_changes_nothing(
    workers: list[Worker], variants: list[Path], tmp_path: Path
) -> None:
    worker, norm = workers[0], tensors_of(variants[0])[NORM]
    wrong: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({NORM: torch.cat([norm, norm])}, "shapes: model.norm.weight has the shape [256], the model's is [128]"),
        ({NORM: norm.to(torch.int32)}, "dtypes: model.norm.weight is int32"),
        ({NORM: torch.full_like(norm, float("nan"))}, "model.norm.weight has a value that is not a finite number"),
        ({NORM: None}, "lacks model.norm.weight"),
        ({"model.extra": norm}, "names: the model has no model.extra"),
    ]
    for tensors, words in wrong:
        directory = changed(tmp_path, variants[0], **tensors)
        async with untouched(worker):
            message = await worker.refused(
                "/update_weights_from_disk", {"model_path": str(directory), "weight_version": "1"}
            )
            assert words in message


async def test_a_body_that_names_no_checkpoint_is_refused_by_its_field(workers: list[Worker], tmp_path: Path) -> None:
    for body, words in (
        ({}, "model_path: must be a string"),
        ({"model_path": "here"}, "model_path: 'here' is not an absolute path"),
        ({"model_path": str(tmp_path / "never")}, "is not a directory on the worker's machine"),
        ({"model_path": str(tmp_path), "load_format": "dummy"}, "load_format: 'dummy' is not offered"),
        ({"model_path": str(tmp_path), "weight_version": 1.5}, "weight_version: must be a string"),
        ({"model_path": str(tmp_path), "keep_pause": 1}, "keep_pause: must be true or false"),
    ):
        assert words in await workers[0].refused("/update_weights_from_disk", body)


async def test_requests_in_flight_refuse_an_update_from_disk(workers: list[Worker], variants: list[Path]) -> None:
    worker = workers[0]
    body = {"model_path": str(variants[0]), "weight_version": "1"}
    [running] = await paused_amid([worker], 1, lambda worker: worker.sample(PROMPT, ENDLESS), "in_place")
    assert "1 requests are in flight" in await worker.refused("/update_weights_from_disk", body)
    await worker.done("/continue_generation")
    assert "1 requests are in flight" in await worker.refused("/update_weights_from_disk", body)
    await worker.sample(PROMPT, 4)  # beside the other one, which goes on
    await worker.done("/pause_generation")
    sample = await running
    assert sample["meta_info"]["finish_reason"]["type"] == "abort"
    whole = {"version": "default", "start": 0, "end": len(sample["output_ids"])}
    assert sample["meta_info"]["weight_versions"] == [whole]


@pytest.mark.parametrize("medium", ["group", "memory"])
async def test_requests_in_flight_refuse_an_update_that_was_staged_before_them(
    medium: str, workers: list[Worker], variants: list[Path]
) -> None:
    """They would go on with a cache of the old weights, under the new version. As from disk."""
    worker, tensors = workers[0], tensors_of(variants[0])
    first, last = ({name: t for name, t in tensors.items() if (name == NORM) is one} for one in (False, True))
    shared = SharedMemory(Workers([worker.url]), pause=None)
    async with trainer_group([worker], "unpaused") as group:
        if medium == "group":
            [(status, answer)] = await group.bucket(first, "1")
            assert (status, answer["applied"]) == (200, False)
        else:
            await shared.begin("1")
            await shared.send(tensors)
        [running] = await computed([worker], 1, lambda worker: worker.sample(PROMPT, ENDLESS))
        async with untouched(worker):
            if medium == "group":
                [(status, answer)] = await group.bucket(last, "1")
                assert (status, "1 requests are in flight" in answer["message"]) == (400, True), answer
            else:
                with pytest.raises(WorkersFailed, match="1 requests are in flight"):
                    await shared.finish()
        await worker.session.post(f"{worker.url}/abort_request", json={"abort_all": True})
        whole = {"version": "default", "start": 0, "end": len((sample := await running)["output_ids"])}
        assert sample["meta_info"]["weight_versions"] == [whole]


async def test_a_bucket_that_does_not_fit_changes_nothing(workers: list[Worker], variants: list[Path]) -> None:
    """It is received all the same, so the trainer does not hang, and the group can be used again."""
    worker, tensors = workers[0], tensors_of(variants[0])
    norm = tensors[NORM]
    async with trainer_group([worker], "wrong") as group:
        for wrong, words in (
            ({NORM: torch.cat([norm, norm])}, "shapes: model.norm.weight"),
            ({"model.extra": norm}, "names: the model has no model.extra"),
            ({NORM: torch.full_like(norm, float("inf"))}, "not a finite number"),
            ({NORM: norm.to(torch.complex64)}, "dtypes: model.norm.weight is complex64"),
        ):
            async with untouched(worker):
                [(status, answer)] = await group.bucket(tensors | wrong, "1")
                assert (status, answer["success"]) == (400, False)
                assert words in answer["message"]
        async with untouched(worker):
            checksums = {NORM: "0" * 64}
            [(status, answer)] = await group.bucket(tensors, "1", checksums=checksums)
            assert (status, words_of(answer)) == (400, "checksums: model.norm.weight")
        [(status, answer)] = await group.bucket(tensors, "1")
        assert (status, answer["applied"]) == (200, True)
        assert answer["rank_results"] == [{"rank": 0, "success": True, "message": "ok", "error": None}]


def words_of(answer: Any) -> str:
    return answer["message"].partition(" arrived")[0]


async def test_an_update_that_lacks_a_tensor_is_not_continued(workers: list[Worker], variants: list[Path]) -> None:
    worker, tensors = workers[0], tensors_of(variants[0])
    del tensors[NORM]
    async with untouched(worker):
        async with trainer_group([worker], "lacking") as group:
            await worker.done("/pause_generation")
            [(status, answer)] = await group.bucket(tensors, "1")
            assert (status, answer["applied"]) == (200, False)
            assert NORM in await worker.refused("/continue_generation")
        await worker.done("/continue_generation")


async def test_groups_that_cannot_be_used_are_refused(workers: list[Worker]) -> None:
    worker = workers[0]
    bucket = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    assert "no group" in await worker.refused("/update_weights_from_distributed", bucket)
    assert "no group" in await worker.refused("/destroy_weights_update_group", {"group_name": "nowhere"})
    assert "have 1, 0 and 1 entries" in await worker.refused(
        "/update_weights_from_distributed", bucket | {"dtypes": []}
    )
    whole = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    for field, value in (("rank_offset", 0), ("world_size", 1), ("master_port", "x"), ("backend", "mpi")):
        assert field in await worker.refused("/init_weights_update_group", whole | {field: value})
    started = time.monotonic()
    message = await worker.refused(
        "/init_weights_update_group", whole | {"group_name": "alone", "backend": "gloo", "timeout_s": TIMEOUT_S}
    )
    assert "the group 'alone' was not formed" in message
    assert time.monotonic() - started < 2 * TIMEOUT_S + 10
    async with trainer_group([worker], "alone"):
        pass


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_trainer_that_ends_or_hangs_leaves_the_model_as_it_was(
    workers: list[Worker], variants: list[Path], how: signal.Signals
) -> None:
    """Samples go on meanwhile, and the error comes in a bounded time."""
    worker, port, name = workers[0], free_port(), f"trainer-{how.name}"
    sent = 5
    command = (sys.executable, "-m", "tests.plane.trainer", str(port), "2", name, str(variants[0]), str(sent))
    trainer = await asyncio.create_subprocess_exec(*dies_with_parent(command), stdout=subprocess.PIPE)
    try:
        async with untouched(worker):
            assert trainer.stdout is not None
            assert await trainer.stdout.readline() == b"up\n"
            group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            await worker.done(
                "/init_weights_update_group", group | {"group_name": name, "backend": "gloo", "timeout_s": TIMEOUT_S}
            )
            tensors = dict(list(tensors_of(variants[0]).items())[: sent + 3])
            body = {
                "names": list(tensors),
                "dtypes": ["float32"] * len(tensors),
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
                "group_name": name,
            }
            bucket = asyncio.create_task(worker.refused("/update_weights_from_distributed", body))
            for _ in range(sent):
                assert await trainer.stdout.readline() == b"sent\n"
            trainer.send_signal(how)
            started, samples = time.monotonic(), 0
            while not bucket.done():
                await worker.sample(PROMPT, 4)
                samples += 1
            assert f"the group {name!r} failed" in await bucket
            assert time.monotonic() - started < TIMEOUT_S + 20
            assert samples > (1 if how == signal.SIGSTOP else 0)
            assert "has failed" in await worker.refused("/update_weights_from_distributed", body)
            await worker.done("/destroy_weights_update_group", {"group_name": name})
        async with trainer_group([worker], name) as again:
            [(status, answer)] = await again.bucket(tensors_of(variants[0]), "1")
            assert (status, answer["applied"]) == (200, True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            trainer.kill()
        await trainer.communicate()


@pytest.mark.slow
async def test_a_vllm_killed_in_an_update_stays_out_until_it_is_updated(
    plane: RunningPlane, workers: list[Worker], variants: list[Path]
) -> None:
    """Its next start has the first weights, which nobody shall sample from in the middle of training."""
    tensors = tensors_of(variants[0])
    half = dict(list(tensors.items())[:20])
    async with trainer_group(workers, "killed") as group:
        for worker in workers:
            await worker.load_from(variants[0], "1")
        assert [status for status, _ in await group.bucket(half, "2")] == [200, 200]
        for process in plane.processes("vllm.entrypoints.openai.api_server")[:1]:
            for one in (*process.children(recursive=True), process):
                one.kill()
        end = time.monotonic() + READY_S
        restarted: list[Worker] = []
        while not restarted:
            assert time.monotonic() < end, plane.log()
            await asyncio.sleep(0.1)
            states = [(worker, *await worker.get("/health")) for worker in workers]
            restarted = [worker for worker, status, text in states if status == 503 and "was started again" in text]
        worker = restarted[0]
        other = next(one for one in workers if one is not worker)
    assert (await other.get("/health"))[0] == 200
    assert await other.version() == "1"
    while plane.routable() > 1:  # until the router's next probe
        assert time.monotonic() < end, plane.log()
        await asyncio.sleep(0.05)
    assert "was started again" in await worker.refused("/continue_generation")
    await worker.load_from(variants[0], "1")
    assert (await worker.get("/health"))[0] == 200
    assert await worker.checksum() == await other.checksum()
    while plane.routable() < 2:
        assert time.monotonic() < end, plane.log()
        await asyncio.sleep(0.05)


async def test_a_second_update_waits_for_the_first(workers: list[Worker], variants: list[Path]) -> None:
    worker = workers[0]
    answers = await asyncio.gather(*(worker.load_from(variants[number % 2], str(number)) for number in range(4)))
    assert all(answer["applied"] for answer in answers)
    assert await worker.version() in {"0", "1", "2", "3"}
    await worker.load_from(model_path(), "default")
