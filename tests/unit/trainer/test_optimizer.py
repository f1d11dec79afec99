"""The optimizer step equals torch.optim.AdamW with torch's clipping (a large eps makes the scale of gradients matter);
and it is made whole or not at all."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.adamw import (
    LARGEST,
    LEAST_EPS,
    NonFiniteGradient,
    adamw_step,
    check_adam,
    gradient_norm,
    norm_of,
)
from skyrl.trainer.lora.adapter import Adapter, Target
from skyrl.trainer.protocol import AdamParams, DeviceFault
from tests.failures import FailingOperation

STEPS = {
    "plain": AdamParams(0.01),
    "clipped": AdamParams(0.01, grad_clip_norm=0.2),
    "decayed": AdamParams(0.01, weight_decay=0.3),
    "both": AdamParams(0.01, weight_decay=0.3, grad_clip_norm=0.2),
}


def _adapter(steps: int = 0, gradient: float | None = None) -> Adapter:
    """An adapter after some steps; `gradient`: a pending one."""
    adapter = Adapter(LoraSpec(3, 32.0, 0), [Target("q_proj", 6, 4), Target("lm_head", 6, 11)], torch.device("cpu"))
    for _ in range(steps):
        adapter.gradient = torch.linspace(-1, 2, adapter.weights.numel())
        adamw_step(adapter, AdamParams(0.02))
    if gradient is not None:
        adapter.gradient = torch.full_like(adapter.weights, gradient)
    return adapter


def _held(adapter: Adapter) -> list[Tensor]:
    """A copy of all numbers of an adapter."""
    parts = (adapter.weights, adapter.gradient, adapter.exp_avg, adapter.exp_avg_sq, torch.tensor(adapter.step))
    return [torch.empty(0) if part is None else part.clone() for part in parts]


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.3, 50.0])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_equal_torch_although_hyper_parameters_change_every_step(clip: float, decay: float) -> None:
    adapter = _adapter()
    parameters = [view.clone().requires_grad_() for view in adapter.views(adapter.weights).values()]
    optimizer = torch.optim.AdamW(parameters)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        gradient = torch.randn(adapter.weights.shape, generator=generator) * 10 ** (step % 3 - 2)
        params = AdamParams(0.01 * (step + 1), 0.9 - 0.05 * step, 0.95, 0.1 / (step + 1), decay, clip)
        for parameter, view in zip(parameters, adapter.views(gradient).values(), strict=True):
            parameter.grad = view.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf"))
        group = optimizer.param_groups[0]
        group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
        group |= {"eps": params.eps, "weight_decay": decay}
        optimizer.step()
        adapter.gradient = gradient
        metrics = adamw_step(adapter, params)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        for parameter, view in zip(parameters, adapter.views(adapter.weights).values(), strict=True):
            torch.testing.assert_close(view, parameter.detach(), atol=1e-7, rtol=1e-6)


def test_the_default_parameters_are_those_of_tinker() -> None:
    assert AdamParams() == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


def test_a_step_without_a_gradient_does_nothing() -> None:
    adapter = _adapter(1)
    before = _held(adapter)
    assert adamw_step(adapter, AdamParams(weight_decay=0.5)) == {}
    assert all(map(torch.equal, _held(adapter), before))


@pytest.mark.parametrize("beta", [0.0, 1 - 2**-53])
def test_the_largest_parameters_of_a_step_do_not_end_it_in_its_middle(beta: float) -> None:
    """torch raises for factors that do not fit into float32."""
    largest = AdamParams(LARGEST, beta, beta, LARGEST, weight_decay=LARGEST)
    assert adamw_step(_adapter(0, 0.5), largest)["learning_rate"] == LARGEST


def test_the_smallest_eps_is_not_0_in_float32() -> None:
    """A weight without a gradient stays as it is."""
    adapter = _adapter(0, 0.0)
    before = adapter.weights.clone()
    check_adam(AdamParams(eps=LEAST_EPS))
    adamw_step(adapter, AdamParams(eps=LEAST_EPS))
    assert torch.equal(adapter.weights, before)


def test_the_norm_of_many_numbers_is_right() -> None:
    """Not added up one after the other in float32, where small squares vanish beside a large sum."""
    adapter = _adapter()
    adapter.gradient = torch.full((2**24,), 0.1)
    assert gradient_norm(adapter) == norm_of(adapter.gradient) == pytest.approx(0.1 * 2**12, rel=1e-4)
    assert norm_of(torch.empty(0)) == 0.0


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_finds_no_memory_changes_nothing_and_one_that_fails_later_is_a_fault_of_the_device(
    name: str, steps: int
) -> None:
    """A step that is half-made cannot be undone here: the engine ends, and the next one restores the model."""
    expected = _adapter(steps, 0.5)
    metrics = adamw_step(expected, STEPS[name])
    lacks = faults = 0
    adapter, failing, found = expected, FailingOperation(0), metrics
    for point in itertools.count():
        adapter = _adapter(steps, 0.5)
        before, failing = _held(adapter), FailingOperation(point, RuntimeError)
        try:
            with failing:
                found = adamw_step(adapter, STEPS[name])
            break
        except DeviceFault:
            faults += 1
        except RuntimeError:
            lacks += 1
            assert all(map(torch.equal, _held(adapter), before)), f"operation {point}"
        assert adapter.step == steps
    assert not failing.failed
    assert lacks >= (4 if steps == 0 else 2), "the norm, the moments of the first step, and the chunk"
    assert faults >= 7, "operations in place"
    assert found == metrics
    assert all(map(torch.equal, _held(adapter), _held(expected)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_cleared_and_the_rest_does_not_change(bad: float) -> None:
    adapter = _adapter(1, bad)
    before = _held(adapter)
    with pytest.raises(NonFiniteGradient, match=str(bad)):
        adamw_step(adapter, STEPS["both"])
    assert adapter.gradient is None
    adapter.gradient = torch.full_like(adapter.weights, bad)
    assert all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(_held(adapter), before, strict=True)
    )
