"""Pictures where the model is divided over ranks, and where the whole language model is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_support import SEEING_FAMILIES, Picture, Sequences, group, logprobs_of, made_once, mixed, text
from safetensors.torch import load_file
from torch_lora_support import assert_close, assert_same, files_saved, ok, saved, spec, stock_terms
from trainer_kinds import FULL, LORA, STEP, WHOLE, Kind, closed_at_end
from transformers import AutoConfig

from skyrl.base.config.loading import load_config
from skyrl.trainer.device import ALIGNMENT
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.protocol import Backend, InvalidRequest, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

TOLERANCE = 1e-3
"""As in test_families_packed."""
GRADIENT_BOUND = {"qwen3.5 that sees": 5e-4, "qwen3.5-moe that sees": 5e-4}
"""Gradients of the delta rule's decays are small sums of large numbers: 1e-4 was seen."""
ONE_IN_CI = ["qwen3-vl", *(pytest.param(name, marks=pytest.mark.slow) for name in SEEING_FAMILIES[1:])]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory)


PathOf = Callable[[str], str]
Make = Callable[..., Any]


@pytest.fixture
def make(path_of: PathOf) -> Iterator[Callable[..., Any]]:
    """Backends of a kind on a family's tiny model; closed at the end."""

    def made(kind: Kind, family: str, ranks: int = 1, *, rows: int = 60) -> Any:
        return kind.backend(ranks, path=path_of(family), micro_batch_tokens=rows)

    with closed_at_end(made) as make:
        yield make


def _learn(backend: Backend, path: Path, kind: Kind) -> tuple[list[PassResult], Any]:
    """A step, then gradients that wait: results, and weights, moments and gradients."""
    backend.create_model("m", kind.model)
    results: list[PassResult] = []
    for _ in range(2):
        passes = [mixed().to("m"), group(Picture.drawn(4), 6).to("m", "ppo"), mixed().to("m", backward=False)]
        results += ok(backend.run(passes))
        if len(results) == 3:
            backend.optim_step("m", STEP)
    return results, files_saved(backend, "m", path)


def _assert_close(one: Any, other: Any) -> None:
    for result, expected in zip(one[0], other[0], strict=True):
        for logprobs, of_other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, of_other, atol=1e-4)
    assert_close(one[1], other[1], TOLERANCE)


@pytest.mark.parametrize("family", ONE_IN_CI)
@pytest.mark.parametrize("kind", [LORA, FULL], ids=str)
def test_ranks_train_on_pictures_as_one_device_does(tmp_path: Path, make: Make, kind: Kind, family: str) -> None:
    alone, sharded = make(kind, family), make(kind, family, 2)
    assert sharded.limits == alone.limits
    assert sharded.limits.sight is not None
    _assert_close(_learn(sharded, tmp_path / "ranks", kind), _learn(alone, tmp_path / "one", kind))


def test_a_rank_whose_picture_has_other_tokens_fails_its_pass_alone(tmp_path: Path, make: Make) -> None:
    wrong = Sequences()
    for seed in range(5):
        placed = Picture.drawn(seed)
        if seed == 3:
            placed = Picture(placed.data, 2, 4)
        wrong.add(text(seed, 9), placed, text(seed, 7), answer=5)
    states = []
    for number, others in enumerate(([], [wrong.to("m")])):
        backend = make(LORA, "qwen3-vl", 2, rows=30)
        backend.create_model("m", spec())
        outcomes = backend.run([*others, mixed().to("m")])
        for outcome in outcomes[:-1]:
            assert isinstance(outcome, InvalidRequest)
            assert str(outcome) == (
                "data[3]: model_input: the picture at position 9 takes 6 tokens of the base model, and 8 were given"
            )
        ok(outcomes[-1:])
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(*states)


@pytest.mark.parametrize("family", ONE_IN_CI)
def test_a_whole_model_trains_on_pictures_as_transformers_does_and_keeps_its_tower(
    tmp_path: Path, path_of: PathOf, make: Make, family: str
) -> None:
    path, backend = path_of(family), make(FULL, family, rows=4096)
    backend.create_model("m", WHOLE)
    sequences = mixed()
    (result,) = ok(backend.run([sequences.to("m")]))
    model: Any = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path, attn_implementation="eager").eval()
    loss = torch.zeros(())
    for datum, logprobs in zip(sequences.data, result.logprobs, strict=True):
        expected = logprobs_of(model, path, datum, sequences.files)
        np.testing.assert_allclose(logprobs, expected.detach(), atol=5e-5)
        loss = loss + stock_terms(expected, datum).sum()
    loss.backward()
    stored = files_saved(backend, "m", tmp_path / "state")
    ours = {name: tensor for name, tensor in stored.items() if name.startswith("gradient.")}
    theirs = {f"gradient.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_close(
        ours,
        {name: tensor for name, tensor in theirs.items() if ".visual." not in name},
        GRADIENT_BOUND.get(family, 2e-5),
    )

    backend.optim_step("m", STEP)
    (tmp_path / "model").mkdir()
    backend.save_adapter("m", tmp_path / "model")
    (before, after) = (load_file(Path(each) / "model.safetensors") for each in (path, tmp_path / "model"))
    assert before.keys() == after.keys()
    towers = [name for name in before if ".visual." in name]
    assert towers
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in towers), name


def test_experts_of_the_sampler_are_followed_at_pictures(path_of: PathOf) -> None:
    backend = LoraBackend(load_config({"base_model": path_of("qwen3-vl-moe")}))
    backend.create_model("m", spec())
    sequences = group(Picture.drawn(1), 3)
    (own,) = ok(backend.run([sequences.to("m", "ppo", backward=False)]))
    recorded = []
    for datum in sequences.data:
        shape = (len(datum.tokens), 2, 2)
        datum.loss_inputs["routed_experts"] = np.broadcast_to(np.array([0, 3]), shape).copy()
        recorded.append(datum)
    (followed,) = ok(backend.run([TrainingPass("m", recorded, "ppo", backward=False, files=sequences.files)]))
    assert followed.metrics["computed_tokens:sum"] == own.metrics["computed_tokens:sum"]
    place = recorded[0].pictures[0].start
    recorded[0].loss_inputs["routed_experts"][place:] = [1, 2]
    (other,) = ok(backend.run([TrainingPass("m", recorded, "ppo", backward=False, files=sequences.files)]))
    assert other.metrics["computed_tokens:sum"] > own.metrics["computed_tokens:sum"]
    assert np.abs(followed.logprobs[0] - own.logprobs[0]).max() > 1e-3
    assert np.abs(followed.logprobs[0] - other.logprobs[0]).max() > 1e-3
    np.testing.assert_allclose(followed.logprobs[1], other.logprobs[1], atol=2e-5)


def test_the_tower_lies_in_memory_where_torch_would_put_it(make: Make) -> None:
    """Else its last bits could be others after a restart."""
    for kind in (LORA, FULL):
        tower = rank_of(make(kind, "qwen3-vl")).base.tower
        assert tower is not None
        assert all(parameter.data_ptr() % ALIGNMENT == 0 for parameter in tower.module.parameters())
