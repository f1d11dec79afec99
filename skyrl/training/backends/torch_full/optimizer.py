"""AdamW on all parameters, in place and in chunks, with torch's semantics and per-step hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl.training.backends.base import AdamParams
from skyrl.training.backends.torch_full.parameters import FullParameters
from skyrl.training.backends.torch_lora.optimizer import non_finite_gradient

CHUNK = 2**24
"""Elements of a chunk. A step needs 4 bytes more for each element of one chunk."""


@dataclass(frozen=True)
class StepMemory:
    """All memory that a step needs besides weights and gradient: the moments, and one chunk."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    scratch: Tensor


def adamw_step(parameters: FullParameters, params: AdamParams) -> dict[str, float]:
    """Clip by global norm, step, clear the gradient. Formulas, metrics and errors are those of
    `torch_lora.optimizer.adamw_step`.

    All memory is allocated before the first number changes: so an error leaves parameters and gradient as they were.
    The first step allocates the moments (8 bytes per parameter); later steps allocate one chunk.
    """
    if parameters.gradient is None:
        return {}
    norm = gradient_norm(parameters)
    if not math.isfinite(norm):
        parameters.gradient = None
        raise non_finite_gradient(norm)
    return take_step(parameters, params, memory_for_step(parameters), norm)


def gradient_norm(parameters: FullParameters) -> float:
    """The norm of the accumulated gradient, which must exist."""
    assert parameters.gradient is not None
    return float(torch.linalg.vector_norm(parameters.gradient))


def memory_for_step(parameters: FullParameters) -> StepMemory:
    """Allocate. Changes nothing; the moments of the first step are zeros."""
    exp_avg, exp_avg_sq = (
        parameters.zeros() if moment is None else moment for moment in (parameters.exp_avg, parameters.exp_avg_sq)
    )
    return StepMemory(exp_avg, exp_avg_sq, torch.empty(min(CHUNK, parameters.numel), device=parameters.device))


@torch.no_grad()
def take_step(parameters: FullParameters, params: AdamParams, memory: StepMemory, norm: float) -> dict[str, float]:
    """Step and clear the gradient, whose norm (over all ranks) is `norm`. Returns the metrics. Allocates nothing."""
    gradient = parameters.gradient
    assert gradient is not None
    step = parameters.step + 1
    clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
    for weights, place in parameters.chunks(CHUNK):
        if clip != 1.0:
            gradient[place].mul_(clip)
        moments = memory.exp_avg[place], memory.exp_avg_sq[place]
        _step_chunk(weights, gradient[place], *moments, memory.scratch, step, params)
    parameters.exp_avg, parameters.exp_avg_sq = memory.exp_avg, memory.exp_avg_sq
    parameters.gradient, parameters.step = None, step
    return {"grad_norm": norm, "learning_rate": float(params.learning_rate), "optimizer_step": float(step)}


def _step_chunk(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scratch: Tensor,
    step: int,
    params: AdamParams,
) -> None:
    exp_avg.lerp_(gradient, 1 - params.beta1)
    exp_avg_sq.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    correction1 = 1 - params.beta1**step
    correction2 = math.sqrt(1 - params.beta2**step)
    denominator = torch.sqrt(exp_avg_sq, out=scratch[: len(gradient)]).div_(correction2).add_(params.eps)
    decay_factor = 1 - params.learning_rate * params.weight_decay
    if decay_factor != 1:
        weights.mul_(decay_factor)
    weights.addcdiv_(exp_avg, denominator, value=-params.learning_rate / correction1)
