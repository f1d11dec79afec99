"""Training with shared prompts gives the numbers of training without, up to rounding: 1e-5 of the largest gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch_lora_support import (
    VOCAB,
    assert_close,
    assert_same,
    base_path,
    files_saved,
    grpo,
    make_backend,
    make_full,
    ok,
    rl,
    saved,
    sft,
    spec,
    train,
)
from transformers import AutoModelForCausalLM

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.attention import packed_attention
from skyrl.trainer.protocol import AdamParams, Datum, PassResult, TrainingPass
from skyrl.trainer.rows import prefixes

STEP = AdamParams(learning_rate=1e-2, eps=0.1, grad_clip_norm=100.0)
"""With an `eps` above the rounding of gradients, as in test_ranks."""


def _mixed_weights() -> list[Datum]:
    """Supervised data on common prompts. Weights at the prompts differ between sequences, and some are 0."""
    rng = np.random.default_rng(5)
    data = []
    for datum in grpo(5, 2, 4, 30):
        weights = rng.choice([0.0, 1.0, -0.5], len(datum.tokens)).astype(np.float32)
        data.append(Datum(datum.tokens, {"target_tokens": datum.loss_inputs["target_tokens"], "weights": weights}))
    return data


def _wide_targets() -> list[Datum]:
    """[N, K] targets; at a common row sequences have some targets in common, and some of their own."""
    rng = np.random.default_rng(6)
    data = []
    for number, datum in enumerate(grpo(6, 2, 3, 25)):
        first = datum.loss_inputs["target_tokens"]
        targets = np.stack([first, *rng.integers(0, VOCAB, (1 + number % 2, len(first)))], axis=1)
        weights = rng.normal(size=targets.shape).astype(np.float32)
        inputs: dict[str, Any] = {"target_tokens": targets, "weights": weights}
        data.append(Datum(datum.tokens, inputs))
    return data


def _turns() -> list[Datum]:
    """Conversations: each datum continues the one before, and two branches leave in the middle."""
    (whole,) = rl(7, 90)
    branches = [_cut(rl(8, 90)[0], 90), _cut(rl(9, 80)[0], 80)]
    for branch in branches:
        branch.tokens[:50] = whole.tokens[:50]
    return [_cut(whole, 20), _cut(whole, 90), *branches, _cut(whole, 45), _cut(whole, 70)]


def _cut(datum: Datum, length: int) -> Datum:
    inputs: dict[str, Any] = {name: array[:length] for name, array in datum.loss_inputs.items()}
    return Datum(datum.tokens[:length].copy(), inputs)


DATA: dict[str, tuple[Callable[[], list[Datum]], str]] = {
    "groups": (lambda: grpo(1, 3, 4, 30), "importance_sampling"),
    "clipped": (lambda: grpo(1, 3, 4, 30), "ppo"),
    "all positions": (lambda: grpo(2, 2, 3, 30), "dro"),
    "turns": (_turns, "importance_sampling"),
    "twice the same": (lambda: [*rl(3, 40, 12), *rl(3, 40, 12)], "importance_sampling"),
    "mixed weights": (_mixed_weights, "cross_entropy"),
    "several targets": (_wide_targets, "cross_entropy"),
}
Run = tuple[list[PassResult], dict[str, Tensor]]


def _trained(make: Callable[[], Any], whole: LoraSpec, files: Callable[..., Any], path: Path, name: str) -> Run:
    """Two steps and one waiting gradient: results, and all weights, moments and gradients."""
    data, loss_fn = DATA[name][0](), DATA[name][1]
    backend = make()
    backend.create_model("m", whole)
    results: list[PassResult] = []
    for _ in range(2):
        results += ok(backend.run([train("m", data, loss_fn)]))
        backend.optim_step("m", STEP)
    results += ok(backend.run([TrainingPass("m", data, loss_fn, backward=False), train("m", data, loss_fn)]))
    return results, files(backend, "m", path)


def _assert_alike(shared: Run, apart: Run, tolerance: float) -> None:
    for one, other in zip(shared[0], apart[0], strict=True):
        assert one.metrics["num_tokens:sum"] == other.metrics["num_tokens:sum"] == other.metrics["computed_tokens:sum"]
        assert one.metrics["computed_tokens:sum"] < 0.7 * one.metrics["num_tokens:sum"]
        assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=1e-4, abs=1e-4)
        for logprobs, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert logprobs.shape == expected.shape
            np.testing.assert_allclose(logprobs, expected, atol=5e-5)
    assert_close(shared[1], apart[1], tolerance)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2-window"])
def test_shared_prompts_train_an_adapter_as_separate_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str
) -> None:
    def run(path: Path) -> Run:
        return _trained(lambda: make_backend(architecture, micro_batch_tokens=96), spec(), saved, path, name)

    shared = run(tmp_path / "shared")
    monkeypatch.setattr(prefixes, "MIN_SAVED_ROWS", 10**9)
    _assert_alike(shared, run(tmp_path / "apart"), 5e-5)


@pytest.mark.parametrize("name", ["groups", "several targets"])
def test_shared_prompts_train_a_whole_model_as_separate_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def run(path: Path) -> Run:
        whole = LoraSpec(rank=0, alpha=32.0, seed=0)
        return _trained(lambda: make_full(micro_batch_tokens=96), whole, files_saved, path, name)

    shared = run(tmp_path / "shared")
    monkeypatch.setattr(prefixes, "MIN_SAVED_ROWS", 10**9)
    _assert_alike(shared, run(tmp_path / "apart"), 2e-5)


def test_losses_logprobs_and_gradients_are_those_of_transformers_in_float64(tmp_path: Path) -> None:
    """The bound: logprobs within 2e-5, gradients within 1e-5 of the largest one."""
    backend = make_backend()
    backend.create_model("m", spec(4, 3))
    ok(backend.run([train("m", sft(0, 30, 9))]))
    backend.optim_step("m", STEP)
    backend.save_adapter("m", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(base_path(), dtype=torch.float64, attn_implementation="eager")
    model = (
        PeftModel.from_pretrained(model, str(tmp_path), is_trainable=True, autocast_adapter_dtype=False).double().eval()
    )
    data = grpo(1, 3, 4, 30)
    (result,) = ok(backend.run([train("m", data, "importance_sampling")]))
    assert result.metrics["computed_tokens:sum"] < 0.5 * result.metrics["num_tokens:sum"]
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        targets, old, advantages = map(torch.from_numpy, datum.loss_inputs.values())
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
        lp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, lp.detach(), atol=2e-5)
        (-((lp - old).where(advantages != 0, 0).exp() * advantages).sum()).backward()
    ours = {name: value for name, value in saved(backend, "m", tmp_path).items() if name.startswith("gradient.")}
    theirs = {
        "gradient." + name.removeprefix("base_model.model.").replace(".default.weight", ""): value.grad
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in ours.items():
        assert float((gradient - theirs[name]).abs().max()) < 1e-5 * largest, name


def test_other_passes_do_not_change_a_bit_of_a_pass_with_shared_prompts(tmp_path: Path) -> None:
    """The others have the same prompts, and one is of the same model."""
    data, other = grpo(1, 3, 4, 30), grpo(1, 3, 5, 30)
    states, results = [], []
    for number, before in enumerate(([], [train("a", other, "ppo"), train("b", data[::-1], "ppo")])):
        backend = make_backend(micro_batch_tokens=96)
        for model_id in "abc":
            backend.create_model(model_id, spec())
        results.append(ok(backend.run([*before, train("c", data, "ppo"), *before]))[len(before)])
        states.append(saved(backend, "c", tmp_path / str(number)))
    assert_same(*states)
    assert results[0].metrics == results[1].metrics
    for one, two in zip(results[0].logprobs, results[1].logprobs, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_mask_is_made_once_for_both_layers_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor | None] = []
    make = packed_attention._mask

    def noted(*arguments: Any) -> Tensor | None:
        made.append(make(*arguments))
        return made[-1]

    backend = make_backend()
    backend.create_model("m", spec())
    monkeypatch.setattr(packed_attention, "_mask", noted)
    training_pass = train("m", grpo(0, 1, 4, 40), "importance_sampling")
    (kept,) = ok(backend.run([training_pass]))
    in_one_layer = len(made)
    with_mask = [mask for mask in made if mask is not None]
    assert with_mask, "those of the answers; the prompt needs none"
    made.clear()
    monkeypatch.setattr(packed_attention, "KEPT_MASK_BYTES", 0)
    (again,) = ok(backend.run([training_pass]))
    assert len(made) == in_one_layer + len(with_mask)
    assert again.metrics == kept.metrics
