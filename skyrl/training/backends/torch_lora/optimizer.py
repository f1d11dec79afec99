"""AdamW on one adapter's flat buffers, with torch's semantics and per-step hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl.training.backends.base import AdamParams
from skyrl.training.backends.torch_lora.adapter import Adapter


class NonFiniteGradient(FloatingPointError):
    """The norm of the accumulated gradient is NaN or infinite: no step was made, and the gradient was cleared."""


def non_finite_gradient(norm: float) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"optim_step: the accumulated gradient has norm {norm}; the weights were not changed and the "
        "gradient was cleared. Check advantages, logprobs and the learning rate of earlier steps."
    )


@dataclass(frozen=True)
class Step:
    """A computed step that has changed nothing yet: what the adapter holds after it, and its metrics."""

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    number: int
    metrics: dict[str, float]


def adamw_step(adapter: Adapter, params: AdamParams) -> dict[str, float]:
    """Clip by global norm, step, clear the gradient.

    As torch.optim.AdamW: decay w -= lr * decay * w, then bias-corrected moments, eps added after the correction of the
    second moment's root. As torch.nn.utils.clip_grad_norm_: factor min(1, max_norm / (norm + 1e-6)).

    Returns `grad_norm` (before clipping), `learning_rate` and `optimizer_step` (1 for the first step). Without an
    accumulated gradient, returns an empty dictionary and changes nothing. Raises NonFiniteGradient: the gradient is
    cleared, and weights, moments and step count have not changed.

    Any other exception leaves the adapter and its gradient as they were: the last statement replaces the old weights
    and moments by the new. So a step takes three more buffers of the adapter's size (12 bytes per trained parameter),
    four with weight decay.
    """
    try:
        step = compute_step(adapter, params)
    except NonFiniteGradient:
        adapter.gradient = None
        raise
    return {} if step is None else take_step(adapter, step)


@torch.no_grad()
def compute_step(adapter: Adapter, params: AdamParams, norm: float | None = None) -> Step | None:
    """The next step of `adamw_step`; None without an accumulated gradient. Changes nothing. `norm`: of the gradient, if
    the adapter has only a part of it.

    Raises NonFiniteGradient."""
    gradient = adapter.gradient
    if gradient is None:
        return None
    if norm is None:
        norm = float(torch.linalg.vector_norm(gradient))
    if not math.isfinite(norm):
        raise non_finite_gradient(norm)
    number = adapter.step + 1
    metrics = {
        "grad_norm": norm,
        "learning_rate": float(params.learning_rate),
        "optimizer_step": float(number),
    }
    return Step(*_stepped(adapter, gradient, norm, number, params), number, metrics)


def take_step(adapter: Adapter, step: Step) -> dict[str, float]:
    """Replace the adapter's weights and moments by those after the step, and clear the gradient. Returns the metrics.
    Allocates nothing."""
    adapter.replace(step.weights, step.exp_avg, step.exp_avg_sq, None, step.number)
    return step.metrics


def _stepped(
    adapter: Adapter, gradient: Tensor, norm: float, step: int, params: AdamParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and both moments after step number `step`. Changes none of the adapter's buffers, nor `gradient`."""
    if params.grad_clip_norm > 0:
        gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
    exp_avg = _or_zeros(adapter.exp_avg, gradient).lerp(gradient, 1 - params.beta1)
    exp_avg_sq = _or_zeros(adapter.exp_avg_sq, gradient).mul(params.beta2)
    exp_avg_sq.addcmul_(gradient, gradient, value=1 - params.beta2)
    del gradient  # free the clipped copy before the denominator is allocated
    correction1 = 1 - params.beta1**step
    correction2 = math.sqrt(1 - params.beta2**step)
    denominator = exp_avg_sq.sqrt().div_(correction2).add_(params.eps)
    decay_factor = 1 - params.learning_rate * params.weight_decay
    weights = adapter.weights if decay_factor == 1 else adapter.weights * decay_factor
    value = -params.learning_rate / correction1
    return torch.addcdiv(weights, exp_avg, denominator, value=value, out=denominator), exp_avg, exp_avg_sq


def _or_zeros(moment: Tensor | None, gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient) if moment is None else moment
