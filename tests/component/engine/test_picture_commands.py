"""Training commands with images in the engine: the same losses after a crash, and an error for a faulty image alone."""

from __future__ import annotations

import base64
import dataclasses
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, harness_in
from msgspec.structs import replace
from PIL import Image

from skyrl.base.config.loading import load_config
from skyrl.base.pictures.picture import digest_of
from skyrl.base.pictures.places import KnownPicture
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.tiny.vision import make
from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.types.weights import LoraSpec
from skyrl.base.wire.sample_request import take_out
from skyrl.engine.trainer_probes import BASE_FLOOR, TrainerProbes, median_size
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db import pictures as rows
from skyrl.storage.db.pictures import CheckedFile
from skyrl.trainer import create_backend
from skyrl.trainer.protocol import PassResult, TrainingPass
from tests.unit.picture_files import png

PICTURES = [png(64, 96, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    make(directory)
    return directory


def datum(sight: VisionConfig, file: bytes, answer: list[int], **more: Any) -> dict[str, Any]:
    """A picture between two tokens of text, and an answer that is trained."""
    prompt_length = 2 + sight.tokens(64, 96)
    length = prompt_length + len(answer) - 1
    weights = [0.0] * (prompt_length - 1) + [1.0] * len(answer)
    image = {"type": "image", "data": base64.b64encode(file).decode(), "format": "png"} | more
    tensors = {
        "target_tokens": {"data": [0] * (prompt_length - 1) + answer, "dtype": "int64", "shape": [length]},
        "weights": {"data": weights, "dtype": "float32", "shape": [length]},
    }
    chunks = [{"tokens": [5]}, image, {"tokens": [6, *answer[:-1]]}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors}


class PictureTrainer:
    """Records passes as the API does: the files in their own table, the body without them."""

    def __init__(self, trainer: Trainer, sight: VisionConfig) -> None:
        self.trainer = trainer
        self.sight = sight

    async def send(self, *data: dict[str, Any]) -> str:
        trainer = self.trainer
        trainer.seq_id += 1
        given = {"data": list(data), "loss_fn": "cross_entropy"}
        body = json.dumps(
            {"model_id": trainer.model_id, "seq_id": trainer.seq_id, "forward_backward_input": given}
        ).encode()
        taken = take_out(body, "json")
        new = {digest: CheckedFile(KnownPicture("png", 64, 96), file) for digest, file in taken.files.items()}
        request_id = f"{trainer.model_id}-{trainer.seq_id}"
        tenant = trainer.session.tenant
        trainer.harness.database.write(lambda c: rows.keep(c, tenant, request_id, taken.names, new, 2**30))
        request = NewRequest(
            Kind.FORWARD_BACKWARD,
            tenant,
            trainer.session.id,
            taken.body,
            model_id=trainer.model_id,
            seq_id=trainer.seq_id,
            id=request_id,
        )
        await trainer.harness.store.record(request)
        if trainer.harness.is_running:
            trainer.harness.engine.ring()
        return request_id

    async def step(self, *data: dict[str, Any]) -> dict[str, float]:
        metrics = (await self.trainer.result(await self.send(*data)))["metrics"]
        await self.trainer.result(await self.trainer.optim_step())
        return metrics


def group(sight: VisionConfig, number: int) -> list[dict[str, Any]]:
    """Four answers about one picture, and one about another."""
    about = [datum(sight, PICTURES[number], [10 + answer, 11, 12]) for answer in range(4)]
    return [*about, datum(sight, PICTURES[number - 1], [20, 21])]


async def _learn(
    harness: Harness, sight: VisionConfig, *, dies: bool
) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """Three steps; with `dies`, the engine dies after the second pass, before its outcome is stored."""
    await harness.start()
    pictures = PictureTrainer(await Trainer.create(harness), sight)
    metrics = [await pictures.step(*group(sight, 0))]
    victim = f"{pictures.trainer.model_id}-{pictures.trainer.seq_id + 1}"
    if dies:
        harness.kill_before_commit_of(lambda request_id: request_id == victim)
    await pictures.send(*group(sight, 1))
    if dies:
        await harness.wait_until_killed()
        harness.database.write(lambda c: rows.forget(c, 10**12))  # nothing that recovery needs
        await harness.start()
    metrics.append((await pictures.trainer.result(victim))["metrics"])
    await pictures.trainer.result(await pictures.trainer.optim_step())
    metrics.append(await pictures.step(*group(sight, 2)))
    state = await pictures.trainer.state()
    await harness.crash()
    return metrics, state


async def test_losses_and_weights_are_bit_equal_after_the_death_of_the_engine(model: Path, tmp_path: Path) -> None:
    sight = VisionConfig.of(str(model))
    async with harness_in(tmp_path / "one", base_model=str(model)) as harness:
        expected = await _learn(harness, sight, dies=False)
    async with harness_in(tmp_path / "two", base_model=str(model)) as harness:
        assert await _learn(harness, sight, dies=True) == expected
    losses = [metrics["loss:sum"] for metrics in expected[0]]
    assert len(set(losses)) == 3


async def test_a_faulty_image_fails_its_command_alone_and_names_its_chunk(model: Path, tmp_path: Path) -> None:
    sight = VisionConfig.of(str(model))
    async with harness_in(tmp_path / "state", base_model=str(model)) as harness:
        await harness.start()
        pictures = PictureTrainer(await Trainer.create(harness), sight)
        trainer = pictures.trainer
        before = await trainer.state()
        tokens = sight.tokens(64, 96)
        wrong = await trainer.outcome(
            await pictures.send(datum(sight, PICTURES[0], [9, 9], expected_tokens=tokens + 1))
        )
        assert wrong.error == (
            f"data[0].model_input.chunks[1].expected_tokens: is {tokens + 1}, and this image of 64 x 96 pixels has "
            f"{tokens} tokens"
        )
        inline = {"data": [datum(sight, PICTURES[0], [9, 9])], "loss_fn": "cross_entropy"}
        refused = await trainer.fails(Kind.FORWARD_BACKWARD, forward_backward_input=inline)
        assert "data[0].model_input.chunks[1]: is neither a PNG nor a JPEG file" in (refused.error or "")
        at_picture = datum(sight, PICTURES[0], [9, 9])
        at_picture["loss_fn_inputs"]["weights"]["data"][2] = 1.0
        trained = await trainer.outcome(await pictures.send(at_picture))
        assert "loss_fn_inputs.weights: must be 0 at position 2" in (trained.error or "")
        assert await trainer.state() == before
        right = await trainer.result(await pictures.send(datum(sight, PICTURES[0], [9, 9], expected_tokens=tokens)))
        assert right["metrics"]["loss:sum"] > 0


async def test_the_files_of_unfinished_commands_outlive_the_engine(model: Path, tmp_path: Path) -> None:
    sight = VisionConfig.of(str(model))
    async with harness_in(tmp_path / "state", base_model=str(model)) as harness:
        await harness.start()
        pictures = PictureTrainer(await Trainer.create(harness), sight)
        await pictures.step(*group(sight, 0))
        await harness.crash()
        waiting = await pictures.send(datum(sight, PICTURES[2], [9, 9]))
        while harness.database.write(lambda c: rows.forget(c, 10**12)):
            pass
        tenant = pictures.trainer.session.tenant
        kept = harness.database.read(lambda c: rows.find(c, tenant, [digest_of(file) for file in PICTURES]))
        assert digest_of(PICTURES[2]) in kept
        await harness.start()
        assert (await pictures.trainer.result(waiting))["metrics"]["loss:sum"] > 0


def test_the_picture_of_the_start_check_changes_what_the_trainer_expects(model: Path, tmp_path: Path) -> None:
    """Or a sampler with another tower would pass the check."""
    config = load_config({"state_dir": tmp_path, "base_model": str(model)})
    backend = create_backend(config)
    probes = TrainerProbes(config, backend, open_store(config))
    seen = probes.run()
    assert seen.picture is not None
    assert seen.seen is not None
    assert len(seen.seen) == len(seen.picture.behind)
    probes.remove()
    blank = BytesIO()
    Image.new("RGB", (96, 64)).save(blank, "PNG")
    data = blank.getvalue()
    picture = replace(seen.picture.picture, digest=digest_of(data))
    other = dataclasses.replace(seen.picture, picture=picture, file=data)
    backend.create_probe("m", LoraSpec(2, 32.0, 0))
    run = TrainingPass("m", [other.datum], "cross_entropy", backward=False, files={picture.digest: data})
    (result,) = backend.run([run])
    assert isinstance(result, PassResult)
    assert median_size(result.logprobs[0][-len(seen.seen) :] - seen.seen) > 2 * BASE_FLOOR
