"""The optimizer step equals torch.optim.AdamW with torch's clipping. A large eps makes the scale of gradients
matter."""

from __future__ import annotations

import pytest
import torch

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.adamw import NonFiniteGradient, adamw_step
from skyrl.trainer.lora.adapter import Adapter, Target
from skyrl.trainer.protocol import AdamParams

TARGETS = [Target("q_proj", 6, 4), Target("lm_head", 6, 11)]


def _adapter(seed: int = 0) -> Adapter:
    return Adapter(LoraSpec(3, 32.0, seed), TARGETS, torch.device("cpu"))


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_cleared_and_changes_no_weights(bad: float) -> None:
    adapter, reference = _adapter(), _adapter()
    for each in (adapter, reference):
        each.gradient = torch.ones_like(each.weights)
        adamw_step(each, AdamParams())
    adapter.gradient = torch.full_like(adapter.weights, bad)
    with pytest.raises(NonFiniteGradient, match=str(bad)):
        adamw_step(adapter, AdamParams())
    assert adamw_step(adapter, AdamParams()) == {}
    for each in (adapter, reference):
        each.gradient = torch.ones_like(each.weights)
        assert adamw_step(each, AdamParams())["optimizer_step"] == 2
    assert torch.equal(adapter.weights, reference.weights)


def test_a_step_without_a_gradient_does_nothing() -> None:
    adapter = _adapter()
    before = adapter.weights.clone()
    assert adamw_step(adapter, AdamParams(weight_decay=0.5)) == {}
    assert torch.equal(adapter.weights, before)
    assert adapter.step == 0
