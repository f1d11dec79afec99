"""Pictures are never trained on, and what is wrong with them fails the pass, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from custom_losses import traced
from picture_support import Picture, Sequences, mixed, text
from torch_lora_support import make_backend, ok, saved, spec

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.base.pictures.picture import PlacedPicture
from skyrl.trainer.losses import LOSSES
from skyrl.trainer.protocol import Datum, InvalidRequest, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.families import IMAGE_TOKEN, make_family

F32 = np.float32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_family("qwen3-vl", tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def make(path: str) -> Callable[[], LoraBackend]:
    """The same backend for all tests, with a new model "m"."""
    made = LoraBackend(load_config({"base_model": path}))

    def with_new_model() -> LoraBackend:
        made.delete_model("m")
        made.create_model("m", spec(4, 1))
        return made

    return with_new_model


def _one(picture: Picture | None = None, *, behind: int = 5) -> tuple[Datum, dict[str, bytes]]:
    """A picture at position 4, with 6 tokens."""
    made = Sequences()
    datum = made.add(text(1, 4), picture or Picture.drawn(1), text(2, behind), answer=behind)
    return datum, made.files


def _refusal(backend: Any, datum: Datum, files: dict[str, bytes], loss: str = "cross_entropy") -> str:
    """What the check and the run say, with another datum before it."""
    good = _one()
    sent = TrainingPass("m", [good[0] if datum.pictures else datum, datum], loss, files={**good[1], **files})
    with pytest.raises(InvalidRequest) as refused:
        backend.check(sent)
    (outcome,) = backend.run([sent])
    assert str(outcome) == str(refused.value)
    return str(outcome)


def test_a_model_of_text_refuses_pictures() -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    datum, files = _one()
    with pytest.raises(InvalidRequest, match=r"^data\[0\]: model_input: the base model takes text only$"):
        backend.check(TrainingPass("m", [replace(datum, tokens=datum.tokens % 90)], "cross_entropy", files=files))


def test_a_file_that_is_missing_is_named(make: Callable[[], LoraBackend]) -> None:
    datum, _ = _one(Picture.drawn(7))
    said = _refusal(make(), datum, {})
    assert said == "data[1]: model_input: the file of the picture at position 4 is missing"


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        ([(4, 6), (9, 2)], "a picture at positions 9 to 10 does not fit between position 10 and the end at 15"),
        ([(10, 6)], "a picture at positions 10 to 15 does not fit between position 0 and the end at 15"),
        ([(-1, 6)], "a picture at positions -1 to 4 does not fit between position 0 and the end at 15"),
        ([(4, 0)], "a picture at positions 4 to 3 does not fit between position 0 and the end at 15"),
        ([(3, 6)], "the picture at position 3 needs token 123 at all of its 6 positions"),
    ],
)
def test_pictures_at_wrong_places_are_refused(
    make: Callable[[], LoraBackend], pictures: list[tuple[int, int]], said: str
) -> None:
    datum, files = _one()
    placed = tuple(PlacedPicture(start, count, next(iter(files)), "png") for start, count in pictures)
    assert _refusal(make(), replace(datum, pictures=placed), files) == f"data[1]: model_input: {said}"


def test_a_file_that_cannot_be_opened_names_its_picture(make: Callable[[], LoraBackend]) -> None:
    """Files are checked before a pass runs. This holds for one that was damaged since."""
    datum, files = _one()
    ((digest, file),) = files.items()
    (outcome,) = make().run([TrainingPass("m", [datum], "cross_entropy", files={digest: file[:1000]})])
    assert isinstance(outcome, InvalidRequest)
    assert str(outcome).startswith("data[0]: model_input: the picture at position 4 is not a complete and valid PNG")


@pytest.mark.parametrize("position", [3, 8])
@pytest.mark.parametrize("name", ["weights", "advantages", "sequence_ratio_mask"])
def test_a_weight_at_a_picture_is_refused(make: Callable[[], LoraBackend], name: str, position: int) -> None:
    """A picture at positions 4 to 9 is the target at 3 to 8. The target at 9 is text."""
    datum, files = _one()
    zeros = np.zeros(len(datum.tokens), F32)
    loss = {"weights": "cross_entropy", "advantages": "ppo", "sequence_ratio_mask": "gspo"}[name]
    inputs: Any = {"target_tokens": datum.loss_inputs["target_tokens"]}
    inputs |= {each: zeros.copy() for each in (*LOSSES[loss].required, *LOSSES[loss].optional)}
    for allowed in (2, 9):
        inputs[name][allowed] = 0.5
    backend = make()
    backend.check(TrainingPass("m", [replace(datum, loss_inputs=inputs)], loss, files=files))
    inputs[name][position] = -1e-3
    assert f"loss_fn_inputs.{name}: must be 0 at position {position}" in _weight_refusal(
        backend, replace(datum, loss_inputs=inputs), files, loss
    )


def _weight_refusal(backend: Any, datum: Datum, files: dict[str, bytes], loss: str) -> str:
    with pytest.raises(InvalidRequest, match=r"^data\[0\]: ") as refused:
        backend.check(TrainingPass("m", [datum], loss, files=files))
    return str(refused.value)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_does_not_see_the_targets_that_are_pictures(
    make: Callable[[], LoraBackend], tmp_path: Path, loss: str
) -> None:
    """Whatever is sent as target or sampled logprob there: the same loss and gradient. The logprob of the target is
    returned."""
    rng = np.random.default_rng(1)
    states, losses, logprobs = [], [], []
    for number in range(2):
        backend = make()
        sequences = mixed()
        for datum in sequences.data:
            count = len(datum.tokens)
            pictured = np.zeros(count, np.bool_)
            for picture in datum.pictures:
                pictured[max(0, picture.start - 1) : picture.stop - 1] = True
            inputs: Any = datum.loss_inputs
            trained = inputs.pop("weights") != 0
            inputs["target_tokens"] = np.where(pictured & (number == 1), IMAGE_TOKEN, inputs["target_tokens"])
            if loss != "cross_entropy":
                sampled = np.random.default_rng(count).normal(-5, 1, count)
                inputs["logprobs"] = np.where(pictured & (number == 1), rng.normal(size=count), sampled).astype(F32)
                inputs["advantages"] = (0.5 * trained).astype(F32)
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = trained.astype(F32)
        (result,) = ok(backend.run([sequences.to("m", loss)]))
        states.append(saved(backend, "m", tmp_path / str(number)))
        losses.append(result.metrics)
        logprobs.append(result.logprobs)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)
    first = mixed().data[0].pictures[0]
    assert logprobs[0][0][first.start] != logprobs[1][0][first.start]
    assert all(np.isfinite(each).all() for each in logprobs[1])


def test_a_custom_loss_may_have_no_gradient_at_a_picture(make: Callable[[], LoraBackend], tmp_path: Path) -> None:
    """It gets all logprobs, those at pictures too, and must leave these out."""
    datum, files = _one()
    assert datum.loss_inputs["weights"][3:9].tolist() == [0.0] * 6
    everywhere = traced(lambda logprobs, weights: (logprobs.sum(), {}), weights=1)
    chosen = traced(lambda logprobs, weights: (-(logprobs * weights).sum(), {}), weights=1)
    sent = TrainingPass("m", [datum], "custom", files=files)
    (refused,) = make().run([replace(sent, custom_loss=everywhere)])
    assert str(refused) == (
        "data[0]: loss_fn: custom loss '<lambda>': has a gradient at position 3, whose target is a token of a picture: "
        "pictures are never trained on"
    )
    states = []
    for training_pass in (replace(sent, custom_loss=chosen), replace(sent, loss_fn="cross_entropy")):
        backend = make()
        ok(backend.run([training_pass]))
        states.append(saved(backend, "m", tmp_path / training_pass.loss_fn))
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)


def test_several_targets_a_row_have_no_loss_at_pictures_either(make: Callable[[], LoraBackend]) -> None:
    datum, files = _one()
    targets = np.stack([datum.loss_inputs["target_tokens"], np.arange(15)], axis=1)
    (without_weights,) = ok(
        make().run(
            [TrainingPass("m", [replace(datum, loss_inputs={"target_tokens": targets})], "cross_entropy", files=files)]
        )
    )
    weights = np.ones((15, 2), F32)
    weights[3:9] = 0
    inputs: Any = {"target_tokens": targets, "weights": weights}
    (expected,) = ok(
        make().run([TrainingPass("m", [replace(datum, loss_inputs=inputs)], "cross_entropy", files=files)])
    )
    assert without_weights.logprobs[0].shape == (15, 2)
    assert without_weights.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    inputs["weights"][5, 1] = 1
    assert "weights: must be 0 at position 5" in _weight_refusal(
        make(), replace(datum, loss_inputs=inputs), files, "cross_entropy"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_mean": "half"}, "its image processor: "),
        ({"merge_size": 1}, "its image processor's merge_size is 1, its vision tower's 2"),
    ],
)
def test_a_model_whose_image_processor_cannot_be_used_does_not_start(
    path: str, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    copy = shutil.copytree(path, tmp_path / "damaged")
    settings = copy / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    with pytest.raises(ConfigError, match=f"cannot load {copy}: {said}"):
        LoraBackend(load_config({"base_model": str(copy)}))
