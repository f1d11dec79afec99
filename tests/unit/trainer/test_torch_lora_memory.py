"""Memory that runs out at any point of an optimizer step, a pass, a save or a load: the model is then in the state
before or in the state after, never between.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_lora_support import assert_close, assert_same, make_backend, ok, rl, saved, sft, spec, train

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.adamw import NonFiniteGradient, adamw_step
from skyrl.trainer.lora import adapter as adapter_module
from skyrl.trainer.lora import files
from skyrl.trainer.lora.adapter import Adapter, Target
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue
from skyrl.trainer.passes import pass_run as running_module
from skyrl.trainer.protocol import AdamParams, Datum, DeviceFault, OutOfMemory, PassResult
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows.prefixes import PrefixTree
from tests.failures import FailingLine, FailingOperation
from tests.local_ranks import rank_of

STEPS = {
    "plain": AdamParams(0.01),
    "clipped": AdamParams(0.01, grad_clip_norm=0.2),
    "decayed": AdamParams(0.01, weight_decay=0.3),
    "both": AdamParams(0.01, weight_decay=0.3, grad_clip_norm=0.2),
}
CPU = torch.device("cpu")


def _adapter(steps: int, gradient: float = 0.5) -> Adapter:
    """An adapter after `steps` optimizer steps, with a pending gradient."""
    adapter = Adapter(LoraSpec(3, 32.0, 0), [Target("q_proj", 6, 4), Target("lm_head", 6, 11)], CPU)
    for _ in range(steps):
        adapter.gradient = torch.linspace(-1, 2, adapter.weights.numel())
        adamw_step(adapter, AdamParams(0.02))
    adapter.gradient = torch.full_like(adapter.weights, gradient)
    return adapter


def _copy_of(adapter: Adapter) -> tuple[Tensor | int | None, ...]:
    """A copy of everything that an adapter holds."""
    tensors = (adapter.weights, adapter.gradient, adapter.exp_avg, adapter.exp_avg_sq)
    return (*(None if tensor is None else tensor.clone() for tensor in tensors), adapter.step)


def _equal(one: tuple[Tensor | int | None, ...], other: tuple[Tensor | int | None, ...]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_finds_no_memory_anywhere_changes_nothing(name: str, steps: int) -> None:
    after = _adapter(steps)
    metrics = adamw_step(after, STEPS[name])
    adapter = _adapter(steps)
    before = _copy_of(adapter)
    point, metrics_after_failures = 0, {}
    for point in itertools.count():
        failing = FailingOperation(point, allocating=True)
        try:
            with failing:
                metrics_after_failures = adamw_step(adapter, STEPS[name])
        except torch.OutOfMemoryError:
            assert _equal(_copy_of(adapter), before), f"operation {point}"
            continue
        assert not failing.failed
        break
    assert point >= (4 if steps == 0 else 2), "the norm, the moments of the first step, and the chunk"
    assert metrics_after_failures == metrics
    assert _equal(_copy_of(adapter), _copy_of(after))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_fails_in_its_arithmetic_is_a_fault_of_the_device(name: str) -> None:
    """A step that is half-made cannot be undone here: the engine ends, and the next one restores the model."""
    faults = 0
    for point in itertools.count():
        adapter = _adapter(1)
        before = _copy_of(adapter)
        failing = FailingOperation(point, RuntimeError)
        try:
            with failing:
                adamw_step(adapter, STEPS[name])
        except RuntimeError:
            assert _equal(_copy_of(adapter), before), f"operation {point}"
        except DeviceFault:
            faults += 1
        if not failing.failed:
            break
        assert adapter.step == 1
    assert faults >= 7, "operations in place"


@pytest.mark.parametrize("gradient", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_kept_or_cleared_and_the_rest_does_not_change(gradient: float) -> None:
    adapter = _adapter(1, gradient)
    before = _copy_of(adapter)
    point = 0
    for point in itertools.count():
        try:
            with FailingOperation(point):
                adamw_step(adapter, STEPS["both"])
        except torch.OutOfMemoryError:
            assert adapter.gradient is not None
        except NonFiniteGradient:
            break
    assert point >= 1
    assert adapter.gradient is None
    assert _equal((before[0], *before[2:]), (adapter.weights, adapter.exp_avg, adapter.exp_avg_sq, adapter.step))


def _backend(*model_ids: str, merge: bool = False, **trainer: Any) -> LoraBackend:
    """A backend whose models have made one optimizer step and have a pending gradient."""
    backend = make_backend(merge=merge, micro_batch_tokens=32, **trainer)
    for number, model_id in enumerate(model_ids):
        backend.create_model(model_id, spec(2, number, train_mlp=False))
        ok(backend.run([train(model_id, sft(number, 7))]))
        backend.optim_step(model_id, STEPS["both"])
        ok(backend.run([train(model_id, sft(number + 9, 5))]))
    return backend


@pytest.mark.parametrize(
    ("merge", "checkpointing"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(False, "auto", marks=pytest.mark.slow),
        (True, "auto"),
    ],
    ids=["alone", "again", "merged"],
)
def test_a_pass_that_fails_at_any_operation_leaves_its_models_gradient(
    tmp_path: Path, merge: bool, checkpointing: Any
) -> None:
    """One model's pass has two slices, the other's has one. The test fails every 29th of about 2,000 operations. Where
    layers may be recomputed, a slice that has failed runs again."""
    passes = [train("a", rl(1, 9, 30), "ppo"), train("b", sft(2, 8))]
    backend = _backend("a", "b", merge=merge, gradient_checkpointing=checkpointing)
    recomputation = rank_of(backend).base.packed.recomputation
    assert recomputation is not None
    estimate = recomputation._per_row
    start = {model_id: saved(backend, model_id, tmp_path / "start" / model_id) for model_id in "ab"}
    ok(backend.run(passes))
    done = {model_id: saved(backend, model_id, tmp_path / "done" / model_id) for model_id in "ab"}
    failures, succeeded = 0, 0
    point = 0
    for point in itertools.count(0, 29):
        for model_id in "ab":
            backend.load_state(model_id, tmp_path / "start" / model_id, optimizer=True)
        recomputation._per_row = estimate  # else each failure would raise it
        failing = FailingOperation(point)
        with failing:
            outcomes = backend.run(passes)
        for model_id, outcome in zip("ab", outcomes, strict=True):
            now = saved(backend, model_id, tmp_path / "now" / model_id)
            if isinstance(outcome, PassResult):  # a merged pass that failed has run again, slice by slice
                assert_close(now, done[model_id], 1e-4 if merge else 0)
            else:
                assert isinstance(outcome, OutOfMemory)
                assert_same(now, start[model_id])
        failures += any(isinstance(outcome, OutOfMemory) for outcome in outcomes)
        succeeded += all(isinstance(outcome, PassResult) for outcome in outcomes)
        if not failing.failed:
            break
    assert point > 500
    assert failures > 20 or succeeded > 20
    assert (succeeded > 20) == (merge or checkpointing == "auto"), (failures, succeeded)


def test_no_memory_for_the_prefixes_of_a_pass_fails_that_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, other = train("a", sft(1, 9)), train("b", sft(2, 8))
    backend = _backend("a", "b")
    (expected,) = ok(_backend("a", "b").run([other]))
    build = running_module.prefix_tree

    def prefix_tree(data: Sequence[Datum]) -> PrefixTree:
        if data is failing.data:
            raise MemoryError("no memory left")
        return build(data)

    monkeypatch.setattr(running_module, "prefix_tree", prefix_tree)
    lost, kept = backend.run([failing, other])
    assert isinstance(lost, OutOfMemory)
    assert isinstance(kept, PassResult)
    assert kept.metrics == expected.metrics


def test_a_failed_attempt_gives_its_memory_back_before_its_slices_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs_refs: list[weakref.ref[Tensor]] = []

    def exhausting(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
        gc.collect()
        still_held = [tensor for tensor in (reference() for reference in logprobs_refs) if tensor is not None]
        logprobs_refs.append(weakref.ref(lp))
        if len(logprobs_refs) == 1:
            raise torch.OutOfMemoryError("no memory left")
        assert not still_held, "the failed attempt still holds its logprobs"
        return LossValue(lp)

    monkeypatch.setitem(LOSSES, "exhausting", Loss(exhausting))
    backend = _backend("a", "b", merge=True)
    data = [train(model_id, sft(3, 4), "cross_entropy") for model_id in "ab"]
    for training_pass in data:
        del training_pass.data[0].loss_inputs["weights"]
    ok(backend.run([train(one.model_id, list(one.data), "exhausting") for one in data]))
    assert len(logprobs_refs) == 3


def _at_line(point: int) -> FailingLine:
    return FailingLine(point, [files, adapter_module])


ANYWHERE = pytest.mark.parametrize("failing_at", [FailingOperation, _at_line], ids=["operations", "lines"])
FailingAt = Callable[[int], FailingOperation | FailingLine]


def _every_failure(failing_at: FailingAt, action: Callable[[], object], check: Callable[[], None]) -> int:
    """Run `action` with a failure at point 0, 1, ... until it succeeds, and `check` after each failure. Returns the
    number of failures."""
    point, failing = 0, failing_at(0)
    for point in itertools.count():
        failing = failing_at(point)
        try:
            with failing:
                action()
        except Exception:  # safetensors turns the injected error into other errors
            assert failing.failed
            check()
            continue
        break
    assert not failing.failed
    return point


@ANYWHERE
def test_a_save_that_fails_anywhere_changes_nothing_and_the_next_one_is_complete(
    tmp_path: Path, failing_at: FailingAt
) -> None:
    backend = make_backend()
    backend.create_model("m", spec(2, train_attn=False, train_mlp=False))
    ok(backend.run([train("m", sft(0, 9))]))
    backend.optim_step("m", STEPS["both"])
    ok(backend.run([train("m", sft(1, 9))]))
    before = saved(backend, "m", tmp_path / "before")
    target = tmp_path / "target"
    target.mkdir()

    def check() -> None:
        assert_same(saved(backend, "m", tmp_path / "after"), before)

    assert _every_failure(failing_at, lambda: backend.save_state("m", target), check) >= 10
    assert_same(saved(backend, "m", target), before)


@ANYWHERE
def test_a_load_that_fails_anywhere_changes_nothing(tmp_path: Path, failing_at: FailingAt) -> None:
    other, backend = make_backend(), make_backend()
    for seed, one in enumerate((other, backend)):
        one.create_model("m", spec(2, seed, train_attn=False, train_mlp=False))
        ok(one.run([train("m", sft(seed, 9))]))
        one.optim_step("m", STEPS["both"])
        ok(one.run([train("m", sft(seed + 1, 9))]))
    source = tmp_path / "source"
    expected = saved(other, "m", source)
    before = saved(backend, "m", tmp_path / "before")

    def check() -> None:
        assert_same(saved(backend, "m", tmp_path / "after"), before)

    assert _every_failure(failing_at, lambda: backend.load_state("m", source, optimizer=True), check) >= 5
    assert_same(saved(backend, "m", tmp_path / "loaded"), expected)


def test_a_failed_allocation_on_the_cpu_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real failure: on the CPU torch raises a plain RuntimeError."""

    def exhausting(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
        return LossValue(torch.empty(2**56, dtype=torch.float32))

    monkeypatch.setitem(LOSSES, "exhausting", Loss(exhausting))
    backend = _backend("a")
    (plain,) = sft(0, 4)
    del plain.loss_inputs["weights"]
    (outcome,) = backend.run([train("a", [plain], "exhausting")])
    assert isinstance(outcome, OutOfMemory)
