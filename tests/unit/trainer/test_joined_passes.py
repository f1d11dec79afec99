"""Passes of one adapter that share prompts with each other give the numbers of passes alone, up to rounding: logprobs
within 2e-5, gradients within 1e-5 of the largest one. A pass at fault changes nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_lora_support import VOCAB, grpo, make_backend, ok, rl, saved, sft, spec, train

from skyrl.trainer import losses
from skyrl.trainer.adamw import NonFiniteGradient
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue
from skyrl.trainer.passes import pass_run as running_module
from skyrl.trainer.passes.pass_run import MicroBatchItem
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, OutOfMemory, PassResult, TrainingPass
from skyrl.trainer.ranks import lora_backend
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows import prefixes
from skyrl.trainer.rows.prefixes import prefix_tree
from tests.local_ranks import rank_of

BATCH = sorted(grpo(1, 3, 4, 30), key=lambda datum: datum.tokens.tolist())
"""Three groups of four samples, one after the other."""


def _backend(architecture: str = "qwen3", *, merge: bool = True, budget: int = 4096) -> LoraBackend:
    """With adapters "a" and "b" that have made a step, so that lora_B is not 0."""
    backend = make_backend(architecture, merge=merge, micro_batch_tokens=budget)
    for model_id in "ab":
        backend.create_model(model_id, spec(seed=ord(model_id)))
        ok(backend.run([train(model_id, sft(0, 20))]))
        backend.optim_step(model_id, AdamParams(learning_rate=1e-2))
    return backend


def _in_the_midst_of_groups(loss_fns: Sequence[str] = ("importance_sampling",) * 3) -> list[TrainingPass]:
    parts = BATCH[:3], BATCH[3:6], BATCH[6:]
    return [train("a", part, loss_fn) for part, loss_fn in zip(parts, loss_fns, strict=True)]


def _assert_close_to_alone(
    results: Sequence[PassResult],
    backend: LoraBackend,
    passes: Sequence[TrainingPass],
    path: Path,
    architecture: str = "qwen3",
) -> None:
    """Within the bound of this file, for the model "a"."""
    alone = _backend(architecture, merge=False)
    for each, result in zip(passes, results, strict=True):
        (expected,) = ok(alone.run([each]))
        assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        assert result.metrics["num_tokens:sum"] == expected.metrics["num_tokens:sum"]
        _assert_close_logprobs(result, expected)
    gradients, others = (_gradient(each, path / name) for each, name in ((backend, "joined"), (alone, "alone")))
    assert gradients.keys() == others.keys()
    largest = max((float(gradient.abs().max()) for gradient in others.values()), default=0.0)
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).abs().max()) < 1e-5 * largest, name


def _assert_close_logprobs(result: PassResult, expected: PassResult) -> None:
    for one, other in zip(result.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def _gradient(backend: LoraBackend, path: Path) -> dict[str, Tensor]:
    return {name: value for name, value in saved(backend, "a", path).items() if name.startswith("gradient.")}


def _rows(data: Sequence[Datum]) -> int:
    return prefix_tree(data).rows(range(len(data)))


def _computed(results: Sequence[PassResult]) -> list[float]:
    return [result.metrics["computed_tokens:sum"] for result in results]


@pytest.mark.parametrize(("architecture", "budget"), [("qwen3", 4096), ("qwen2-window", 72)])
def test_passes_that_share_prompts_are_those_alone_within_the_bound(
    tmp_path: Path, architecture: str, budget: int
) -> None:
    """A common row counts for the first of the passes that have it; those of another adapter share none of them."""
    passes = _in_the_midst_of_groups(("importance_sampling", "ppo", "dro"))
    others = [replace(each, model_id="b") for each in passes]
    backend = _backend(architecture, budget=budget)
    results = ok(backend.run([each for pair in zip(passes, others, strict=True) for each in pair]))
    ends = np.cumsum([len(each.data) for each in passes])
    if budget == 4096:
        for of_model in (results[0::2], results[1::2]):
            assert np.cumsum(_computed(of_model)).tolist() == [_rows(BATCH[:end]) for end in ends]
    assert sum(_computed(results[0::2])) < sum(_rows(each.data) for each in passes) - 25
    _assert_close_to_alone(results[0::2], backend, passes, tmp_path, architecture)


def test_forwards_share_prompts_with_each_other_and_with_no_backward() -> None:
    backwards = _in_the_midst_of_groups()
    forwards = [replace(each, backward=False) for each in backwards]
    alone = ok(_backend(merge=False).run(forwards))
    results = ok(_backend().run([each for pair in zip(forwards, backwards, strict=True) for each in pair]))
    assert sum(_computed(results[0::2])) == sum(_computed(results[1::2])) == _rows(BATCH)
    for result, expected in zip(results[0::2], alone, strict=True):
        _assert_close_logprobs(result, expected)


def _overflow(datum: Datum) -> None:
    datum.loss_inputs["logprobs"][:] = -500


def _explode(datum: Datum) -> None:
    """The loss stays finite, and the square of the gradient exceeds the range of float32."""
    datum.loss_inputs["advantages"][-1:] = 1e30


def _steepen(datum: Datum) -> None:
    datum.loss_inputs["advantages"][-1] = np.inf


def _with_one_spoilt(data: Sequence[Datum], spoil: Callable[[Datum], None], place: int) -> list[Datum]:
    copies = [Datum(d.tokens, {name: array.copy() for name, array in d.loss_inputs.items()}) for d in data]
    spoil(copies[place])
    return copies


def _steep(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
    """Where an advantage is infinite, the loss is 0 and its gradient infinite. Elsewhere it is `-lp A`."""
    advantages = inputs.tensors["advantages"]
    steep = advantages.isinf()
    terms = -lp * torch.where(steep, 0, advantages)
    return LossValue(terms.masked_scatter(steep, (lp - lp.detach())[steep].sqrt()))


@pytest.mark.parametrize(
    ("spoil", "said", "budget", "place"),
    [
        (_overflow, "the sum of", 4096, 0),
        (_overflow, "the sum of", 40, -1),
        (_explode, "the gradient of", 4096, -1),
        (_explode, "the gradient of", 40, 0),
    ],
)
def test_a_pass_that_is_not_finite_fails_alone_and_changes_no_neighbour(
    tmp_path: Path, spoil: Callable[[Datum], None], said: str, budget: int, place: int
) -> None:
    """In one item, or in several micro-batches."""
    first, _, last = _in_the_midst_of_groups()
    bad = _with_one_spoilt(BATCH[3:6], spoil, place)
    backend = _backend(budget=budget)
    one, failed, other = backend.run([first, train("a", bad, "importance_sampling"), last])
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith(f"loss_fn: {said} importance_sampling is")
    _assert_close_to_alone(ok([one, other]), backend, [first, last], tmp_path)
    assert backend.optim_step("a", AdamParams())["grad_norm"] > 0


def test_a_pass_found_in_one_of_several_items_of_a_micro_batch_changes_no_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part of the second item is finite, and was scored before the first item was recorded."""
    monkeypatch.setitem(LOSSES, "steep", Loss(_steep, ("logprobs", "advantages")))
    backend = _backend()
    monkeypatch.setattr(prefixes, "MAX_COPIES", 2)
    monkeypatch.setattr(losses, "check_pass", lambda *_, **__: None)  # which refuses infinite advantages
    good = train("a", BATCH[0::2], "steep")
    result, failed = backend.run([good, train("a", _with_one_spoilt(BATCH[1::2], _steepen, 0), "steep")])
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith("loss_fn: the gradient of steep is")
    _assert_close_to_alone(ok([result]), backend, [good], tmp_path)


def test_a_gradient_without_a_finite_norm_fails_its_pass_where_passes_are_merged_and_the_step_elsewhere() -> None:
    passes = [train("a", sft(1, 20)), train("a", _with_one_spoilt(BATCH[:2], _explode, 0), "importance_sampling")]
    merged, single = _backend(), _backend(merge=False)
    _, failed = merged.run(passes)
    assert str(failed).startswith("loss_fn: the gradient of importance_sampling is not finite")
    assert merged.optim_step("a", AdamParams())["grad_norm"] > 0
    ok(single.run(passes))
    with pytest.raises(NonFiniteGradient):
        single.optim_step("a", AdamParams())


def test_a_pass_of_zeros_has_a_gradient_although_the_pass_that_it_joins_fails() -> None:
    """A short prompt in common: sequences without advantages run without a backward. The step after them is one."""
    rng = np.random.default_rng(0)
    prompt, data = rng.integers(0, VOCAB, 20), rl(1, 90, 90, 90, 90)
    for datum in data:
        datum.tokens[:20] = prompt
    for datum in data[:3]:
        datum.loss_inputs["advantages"][:] = 0
    passes = [train("a", data[:3], "ppo"), train("a", _with_one_spoilt(data[3:], _overflow, 0), "importance_sampling")]
    steps = []
    for merge in (False, True):
        backend = _backend(merge=merge)
        one, failed = backend.run(passes)
        ok([one])
        assert str(failed).startswith("loss_fn: the sum of importance_sampling is")
        steps.append(backend.optim_step("a", AdamParams()))
    assert steps[0] == steps[1] == {"grad_norm": 0.0, "learning_rate": 1e-4, "optimizer_step": 2.0}


def test_a_pass_that_raises_fails_alone_and_the_others_run_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setitem(LOSSES, "exhausting", Loss(out_of_memory, ("logprobs", "advantages")))
    passes = _in_the_midst_of_groups(("ppo", "exhausting", "ppo"))
    backend = _backend()
    one, failed, other = backend.run(passes)
    assert isinstance(failed, OutOfMemory)
    _assert_close_to_alone(ok([one, other]), backend, [passes[0], passes[2]], tmp_path)


@pytest.mark.parametrize(
    ("place", "name", "lacks"),
    [
        (running_module, "prefix_tree", lambda data: len(data) == len(BATCH)),
        (MicroBatchItem, "left", lambda item: item.running.joins_passes),
        (torch, "_foreach_norm", lambda gradients: len(gradients) > 1),
    ],
    ids=["common tree", "what is left of failed passes", "norms"],
)
def test_passes_run_apart_if_there_is_no_memory_for_what_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, lacks: Callable[[Any], bool]
) -> None:
    asked, given = [], getattr(place, name)

    def short(what: Any) -> Any:
        if lacks(what):
            asked.append(what)
            raise torch.OutOfMemoryError
        return given(what)

    passes = _in_the_midst_of_groups()
    backend = _backend()
    monkeypatch.setattr(place, name, short)
    results = ok(backend.run([train("b", sft(1, 20)), train("b", sft(2, 20)), *passes]))
    assert asked
    _assert_close_to_alone(results[2:], backend, passes, tmp_path)


def test_passes_share_a_micro_batch_on_a_cpu_only_up_to_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_backend, "SHARED_ROWS_ON_CPU", 64)
    backend, ran = make_backend(merge=True), list[list[int]]()
    for model_id in "abcd":
        backend.create_model(model_id, spec())
    packed: Any = rank_of(backend).base.packed
    inner = packed.forward

    def seen(pieces: Any, *arguments: Any) -> Any:
        ran.append([each.stop - each.start for each in pieces])
        return inner(pieces, *arguments)

    monkeypatch.setattr(packed, "forward", seen)
    ok(backend.run([train(name, sft(1, size)) for name, size in zip("abcd", (30, 30, 100, 20), strict=True)]))
    assert ran == [[30, 30], [100], [20]]
