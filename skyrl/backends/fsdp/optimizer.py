"""AdamW on one adapter's flat buffers, with torch's semantics and per-step hyper-parameters.

Deliberately knows nothing of how gradients came about.
"""

from __future__ import annotations

import math

import torch

from skyrl.backends.base import AdamParams
from skyrl.backends.fsdp.adapter import Adapter


class NonFiniteGradient(FloatingPointError):
    """The accumulated gradient has a NaN or infinite norm: the step was refused, the gradient was cleared."""


@torch.no_grad()
def adamw_step(adapter: Adapter, params: AdamParams) -> dict[str, float]:
    """Clip by global norm, step, clear the gradient.

    As torch.optim.AdamW: decay w -= lr * decay * w, then bias-corrected moments, eps added after the
    correction of the second moment's root. As torch.nn.utils.clip_grad_norm_: factor min(1, max_norm / (norm
    + 1e-6)). Returns `grad_norm` (before clipping), `learning_rate` and `optimizer_step` (1 for the first);
    an empty dictionary and no change without an accumulated gradient. Raises NonFiniteGradient: weights,
    moments and step count are as before, the gradient is cleared, so that the next forward_backward starts
    clean.
    """
    gradient, adapter.gradient = adapter.gradient, None
    if gradient is None:
        return {}
    norm = float(torch.linalg.vector_norm(gradient))
    if not math.isfinite(norm):
        raise NonFiniteGradient(
            f"optim_step: the accumulated gradient has norm {norm}; the weights were not changed and the "
            "gradient was cleared. Check advantages, logprobs and the learning rate of earlier steps."
        )
    if params.grad_clip_norm > 0:
        gradient.mul_(min(1.0, params.grad_clip_norm / (norm + 1e-6)))
    if adapter.exp_avg is None or adapter.exp_avg_sq is None:
        adapter.exp_avg, adapter.exp_avg_sq = torch.zeros_like(gradient), torch.zeros_like(gradient)
    adapter.step += 1
    adapter.weights.mul_(1 - params.learning_rate * params.weight_decay)
    adapter.exp_avg.lerp_(gradient, 1 - params.beta1)
    adapter.exp_avg_sq.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    correction1 = 1 - params.beta1**adapter.step
    correction2 = math.sqrt(1 - params.beta2**adapter.step)
    denominator = (adapter.exp_avg_sq.sqrt() / correction2).add_(params.eps)
    adapter.weights.addcdiv_(adapter.exp_avg, denominator, value=-params.learning_rate / correction1)
    return {
        "grad_norm": norm,
        "learning_rate": float(params.learning_rate),
        "optimizer_step": float(adapter.step),
    }
