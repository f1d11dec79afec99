"""Memory that runs out at any point of a pass, a save or a load of an adapter: it is then in the state before or in the
state after, never between. test_optimizer has steps, test_contract what ranks do together."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_lora_support import assert_close, assert_same, make_backend, ok, rl, saved, sft, spec, train

from skyrl.trainer.lora import adapter as adapter_module
from skyrl.trainer.lora import files
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue
from skyrl.trainer.protocol import AdamParams, OutOfMemory, PassResult
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.failures import FailingLine, FailingOperation
from tests.local_ranks import rank_of

STEP = AdamParams(0.01, weight_decay=0.3, grad_clip_norm=0.2)


def _backend(*model_ids: str, merge: bool = False, **trainer: Any) -> LoraBackend:
    """A backend whose models have made one optimizer step and have a pending gradient."""
    backend = make_backend(merge=merge, micro_batch_tokens=32, **trainer)
    for number, model_id in enumerate(model_ids):
        backend.create_model(model_id, spec(2, number, train_mlp=False))
        ok(backend.run([train(model_id, sft(number, 7))]))
        backend.optim_step(model_id, STEP)
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
    """One model's pass has two slices, the other's has one. The test fails every 83rd of about 2,000 operations. Where
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
    for point in itertools.count(0, 83):
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
    assert failures > 10 or succeeded > 10
    assert (succeeded > 10) == (merge or checkpointing == "auto"), (failures, succeeded)


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
    data = [train(model_id, sft(3, 40), "cross_entropy") for model_id in "ab"]  # so many rows that they are measured
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
    backend.optim_step("m", STEP)
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
        one.optim_step("m", STEP)
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
