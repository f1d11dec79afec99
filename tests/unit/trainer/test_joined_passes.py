"""Passes of one adapter that share prompts with each other give the numbers of passes alone, up to rounding: logprobs
within 2e-5, gradients within 1e-5 of the largest one. A pass at fault changes nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_lora_support import assert_same, grpo, make_backend, ok, saved, sft, spec, train

from skyrl.trainer import checks
from skyrl.trainer.adamw import NonFiniteGradient
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue
from skyrl.trainer.passes import pass_run as running_module
from skyrl.trainer.passes.pass_run import MicroBatchItem
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, OutOfMemory, PassResult, TrainingPass
from skyrl.trainer.ranks import lora_rank as passes_module
from skyrl.trainer.ranks import rank as rank_module
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows import prefixes
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree
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
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
    gradients, others = (_gradient(each, path / name) for each, name in ((backend, "joined"), (alone, "alone")))
    assert gradients.keys() == others.keys()
    largest = max((float(gradient.abs().max()) for gradient in others.values()), default=0.0)
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).abs().max()) < 1e-5 * largest, name


def _gradient(backend: LoraBackend, path: Path) -> dict[str, Tensor]:
    return {name: value for name, value in saved(backend, "a", path).items() if name.startswith("gradient.")}


def _rows(data: Sequence[Datum]) -> int:
    return prefix_tree(data).rows(range(len(data)))


def _computed(results: Sequence[PassResult]) -> list[float]:
    return [result.metrics["computed_tokens:sum"] for result in results]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2-window"])
@pytest.mark.parametrize("budget", [4096, 72])
def test_passes_that_share_prompts_are_those_alone_within_the_bound(
    tmp_path: Path, architecture: str, budget: int
) -> None:
    passes = _in_the_midst_of_groups(("importance_sampling", "ppo", "dro"))
    backend = _backend(architecture, budget=budget)
    results = ok(backend.run(passes))
    assert sum(_computed(results)) < sum(_rows(each.data) for each in passes) - 25, "they share rows with each other"
    _assert_close_to_alone(results, backend, passes, tmp_path, architecture)


def test_a_common_row_counts_for_the_first_of_the_passes_that_have_it() -> None:
    passes = _in_the_midst_of_groups()
    results = ok(_backend().run(passes))
    ends = np.cumsum([len(each.data) for each in passes])
    assert np.cumsum(_computed(results)).tolist() == [_rows(BATCH[:end]) for end in ends]


def test_forwards_share_prompts_with_each_other_and_with_no_backward() -> None:
    backwards = _in_the_midst_of_groups()
    forwards = [TrainingPass(each.model_id, each.data, each.loss_fn, backward=False) for each in backwards]
    backend = _backend()
    alone = ok(_backend(merge=False).run(forwards))
    results = ok(backend.run([each for pair in zip(forwards, backwards, strict=True) for each in pair]))
    assert sum(_computed(results[0::2])) == sum(_computed(results[1::2])) == _rows(BATCH)
    for result, expected in zip(results[0::2], alone, strict=True):
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


def test_passes_of_different_adapters_share_no_rows(tmp_path: Path) -> None:
    passes = _in_the_midst_of_groups()
    others = [replace(each, model_id="b") for each in passes]
    backend = _backend()
    results = ok(backend.run([each for pair in zip(passes, others, strict=True) for each in pair]))
    assert sum(_computed(results[0::2])) == sum(_computed(results[1::2])) == _rows(BATCH)
    _assert_close_to_alone(results[0::2], backend, passes, tmp_path)


def test_passes_that_share_no_rows_make_one_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [train("a", BATCH[start : start + 4], "ppo") for start in (0, 4, 8)]
    backend = _backend()
    made: list[Sequence[Datum]] = []
    monkeypatch.setattr(running_module, "prefix_tree", lambda data: (made.append(data), prefix_tree(data))[1])
    results = ok(backend.run(groups))
    assert len(made) == 1
    assert _computed(results) == [_rows(each.data) for each in groups]
    _assert_close_to_alone(results, backend, groups, tmp_path)


def test_without_merging_passes_share_nothing_and_give_the_bits_of_passes_alone(tmp_path: Path) -> None:
    passes = _in_the_midst_of_groups()
    together, alone = _backend(merge=False), _backend(merge=False)
    results = ok(together.run(passes))
    for result, each in zip(results, passes, strict=True):
        (expected,) = ok(alone.run([each]))
        assert result.metrics == expected.metrics
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_array_equal(one, other)
    assert_same(saved(together, "a", tmp_path / "together"), saved(alone, "a", tmp_path / "alone"))


def _overflow(datum: Datum) -> None:
    datum.loss_inputs["logprobs"][:] = -500


def _explode(datum: Datum) -> None:
    """The loss stays finite, and the square of the gradient exceeds the range of float32."""
    datum.loss_inputs["advantages"][-1:] = 1e30


def _with_one_spoilt(data: Sequence[Datum], spoil: Callable[[Datum], None], place: int) -> list[Datum]:
    copies = [Datum(d.tokens, {name: array.copy() for name, array in d.loss_inputs.items()}) for d in data]
    spoil(copies[place])
    return copies


@pytest.mark.parametrize("place", [0, -1], ids=["first slice", "last slice"])
@pytest.mark.parametrize("budget", [4096, 40], ids=["one slice", "slices"])
@pytest.mark.parametrize(("spoil", "said"), [(_overflow, "the sum of"), (_explode, "the gradient of")])
def test_a_pass_that_is_not_finite_fails_alone_and_changes_no_neighbour(
    tmp_path: Path, spoil: Callable[[Datum], None], said: str, budget: int, place: int
) -> None:
    first, _, last = _in_the_midst_of_groups()
    bad = _with_one_spoilt(BATCH[3:6], spoil, place)
    backend = _backend(budget=budget)
    one, failed, other = backend.run([first, train("a", bad, "importance_sampling"), last])
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith(f"loss_fn: {said} importance_sampling is")
    _assert_close_to_alone(ok([one, other]), backend, [first, last], tmp_path)
    assert backend.optim_step("a", AdamParams())["grad_norm"] > 0


def _steep(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
    """Where an advantage is infinite, the loss is 0 and its gradient infinite. Elsewhere it is `-lp A`."""
    advantages = inputs.tensors["advantages"]
    steep = advantages.isinf()
    terms = -lp * torch.where(steep, 0, advantages)
    return LossValue(terms.masked_scatter(steep, (lp - lp.detach())[steep].sqrt()))


def test_a_pass_found_in_one_of_several_slices_of_a_micro_batch_changes_no_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part of the second slice is finite, and was scored before the first slice was recorded."""
    micro_batches: list[Sequence[MicroBatchItem]] = []

    def spy(batch: Sequence[MicroBatchItem], *, backward: bool) -> None:
        micro_batches.append(batch)
        run(batch, backward=backward)

    def spoil(datum: Datum) -> None:
        datum.loss_inputs["advantages"][-1] = np.inf

    monkeypatch.setitem(LOSSES, "steep", Loss(_steep, ("logprobs", "advantages")))
    first, second = BATCH[0::2], _with_one_spoilt(BATCH[1::2], spoil, 0)
    backend = _backend()
    run = rank_of(backend)._attempt
    monkeypatch.setattr(prefixes, "MAX_COPIES", 2)
    monkeypatch.setattr(rank_of(backend), "_attempt", spy)
    monkeypatch.setattr(checks, "check_pass", lambda *_: None)  # which refuses infinite advantages
    good = train("a", first, "steep")
    result, failed = backend.run([good, train("a", second, "steep")])
    slices = micro_batches[0]
    assert [len(piece.parts) for piece in slices] == [2, 2]
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith("loss_fn: the gradient of steep is")
    _assert_close_to_alone(ok([result]), backend, [good], tmp_path)


def test_a_pass_whose_sum_is_not_finite_is_left_out_at_once_where_losses_are_computed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, beside a pass of another adapter."""
    monkeypatch.setattr(passes_module, "groups_adapters", lambda device: True)
    monkeypatch.setattr(rank_module, "items_of", lambda *_: pytest.fail("a pass ran again"))
    first, _, last = _in_the_midst_of_groups()
    bad = train("a", _with_one_spoilt(BATCH[3:6], _overflow, 1), "importance_sampling")
    backend = _backend()
    one, beside, failed, other = backend.run([first, train("b", BATCH[:2], "importance_sampling"), bad, last])
    assert isinstance(failed, InvalidRequest)
    ok([beside])
    _assert_close_to_alone(ok([one, other]), backend, [first, last], tmp_path)


def test_no_memory_for_norms_fails_only_the_pass_whose_norm_cannot_be_computed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = [train("b", sft(1, 20)), train("a", BATCH[:2], "ppo")]
    backend = _backend()
    asked: list[int] = []
    norms = torch._foreach_norm  # type: ignore[attr-defined]

    def short(gradients: list[Tensor]) -> Sequence[Tensor]:
        asked.append(len(gradients))
        if len(asked) <= 2:
            raise torch.OutOfMemoryError
        return norms(gradients)

    monkeypatch.setattr(torch, "_foreach_norm", short)
    failed, result = backend.run(passes)
    assert asked == [2, 1, 1], "together, then each alone"
    assert isinstance(failed, OutOfMemory)
    _assert_close_to_alone(ok([result]), backend, passes[1:], tmp_path)
    assert backend.optim_step("b", AdamParams()) == {}, "no gradient was kept"


def test_a_gradient_without_a_finite_norm_fails_its_pass_where_passes_are_merged_and_the_step_elsewhere() -> None:
    passes = [train("a", sft(1, 20)), train("a", _with_one_spoilt(BATCH[:2], _explode, 0), "importance_sampling")]
    merged, single = _backend(), _backend(merge=False)
    _, failed = merged.run(passes)
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith("loss_fn: the gradient of importance_sampling is not finite")
    assert merged.optim_step("a", AdamParams())["grad_norm"] > 0
    ok(single.run(passes))
    with pytest.raises(NonFiniteGradient):
        single.optim_step("a", AdamParams())


def test_a_forward_that_is_not_finite_lets_no_neighbour_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [_with_one_spoilt(BATCH[:6], _overflow, 5), BATCH[6:]]
    data[0] += BATCH[6:7]
    passes = [TrainingPass("a", each, "importance_sampling", backward=False) for each in data]
    alone = ok(_backend(merge=False).run(passes[1:]))
    monkeypatch.setattr(rank_module, "items_of", lambda *_: pytest.fail("a pass ran again"))
    failed, result = _backend(budget=40).run(passes)
    assert isinstance(failed, InvalidRequest)
    for one, other in zip(ok([result])[0].logprobs, alone[0].logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_the_gradient_of_joined_passes_does_not_wait_for_other_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _backend(budget=72)
    run, added = rank_of(backend)._attempt, list[bool]()

    def spy(batch: Sequence[MicroBatchItem], *, backward: bool) -> None:
        added.append(rank_of(backend).adapters["a"].gradient is not None)
        run(batch, backward=backward)

    monkeypatch.setattr(rank_of(backend), "_attempt", spy)
    passes = _in_the_midst_of_groups()
    ok(backend.run([*passes, *(train("b", list(each.data), each.loss_fn) for each in passes)]))
    assert (added[0], added[-1]) == (False, True)


def test_no_memory_to_leave_failed_passes_out_changes_no_other_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = MicroBatchItem.left

    def short(piece: MicroBatchItem) -> MicroBatchItem | None:
        if piece.running.joins_passes:
            raise MemoryError
        return left(piece)

    passes = _in_the_midst_of_groups()
    backend = _backend()
    monkeypatch.setattr(MicroBatchItem, "left", short)
    results = ok(backend.run([train("b", sft(1, 20)), *passes]))
    _assert_close_to_alone(results[1:], backend, passes, tmp_path)


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


def test_passes_run_apart_if_there_is_no_memory_for_their_common_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(data: Sequence[Datum]) -> PrefixTree:
        if len(data) == len(BATCH):
            raise MemoryError
        return prefix_tree(data)

    passes = _in_the_midst_of_groups()
    backend = _backend()
    monkeypatch.setattr(running_module, "prefix_tree", short)
    results = ok(backend.run(passes))
    assert _computed(results) == [_rows(each.data) for each in passes]
    _assert_close_to_alone(results, backend, passes, tmp_path)
