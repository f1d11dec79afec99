"""AdamW on flat float32 buffers, in place and in chunks, with torch's semantics and per-step hyper-parameters.

Knows storage. Knows nothing of layers, batches or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl.trainer.lora.adapter import Buffers
from skyrl.trainer.protocol import AdamParams, DeviceFault, InvalidRequest


class NonFiniteGradient(FloatingPointError):
    """The norm of the accumulated gradient is NaN or infinite: no step was made, and the gradient was cleared."""


CHUNK = 2**24
"""Elements of a chunk. A step needs 4 bytes more for each element of one chunk."""


@dataclass(frozen=True)
class StepMemory:
    """All memory that a step needs besides weights and gradient: the moments, and one chunk."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    scratch: Tensor


NORM_PIECE = 2**16
"""Elements whose squares a CPU adds one after the other in float32. Of 2^26 random numbers at once, torch's norm is
0.5 % too small; the norm of the norms of such pieces is right to 1e-5."""


def gradient_norm(buffers: Buffers) -> float:
    """The norm of the accumulated gradient, which must exist."""
    assert buffers.gradient is not None
    return norm_of(buffers.gradient)


def norm_of(flat: Tensor) -> float:
    """The norm of a flat float32 tensor; infinite where a square does not fit into float32. A GPU adds in a tree, and
    needs no pieces."""
    norms = [torch.linalg.vector_norm(piece) for piece in (flat.split(NORM_PIECE) if flat.is_cpu else [flat])]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def adamw_step(
    buffers: Buffers,
    params: AdamParams,
    *,
    norm: Callable[[Buffers], float] = gradient_norm,
    agreed: Callable[[Callable[[], StepMemory]], StepMemory] = lambda action: action(),
) -> dict[str, float]:
    """Clip by global norm, step, clear the gradient.

    As torch.optim.AdamW: decay w -= lr * decay * w, then bias-corrected moments, eps added after the correction of the
    second moment's root. As torch.nn.utils.clip_grad_norm_: factor min(1, max_norm / (norm + 1e-6)).

    Returns `grad_norm` (before clipping), `learning_rate` and `optimizer_step` (1 for the first step). Without an
    accumulated gradient, returns an empty dictionary and changes nothing. Raises NonFiniteGradient: the gradient is
    cleared, and weights, moments and step count have not changed.

    Any other Exception leaves weights and gradient as they were: all memory is allocated before the first number
    changes. The first step allocates the moments (8 bytes per weight); later steps allocate one chunk. What fails from
    then on raises DeviceFault.

    Where there are ranks, `norm` is that of all of them, and `agreed` runs the allocation on all ranks or none.
    """
    if buffers.gradient is None:
        return {}
    found = norm(buffers)
    if not math.isfinite(found):
        buffers.gradient = None
        raise NonFiniteGradient(
            f"optim_step: the accumulated gradient has norm {found}; the weights were not changed and the "
            "gradient was cleared. Check advantages, logprobs and the learning rate of earlier steps."
        )
    return _take_step(buffers, params, agreed(lambda: memory_for_step(buffers)), found)


def memory_for_step(buffers: Buffers) -> StepMemory:
    """Allocate. Changes nothing; the moments of the first step are zeros."""
    exp_avg, exp_avg_sq = (
        buffers.zeros() if moment is None else moment for moment in (buffers.exp_avg, buffers.exp_avg_sq)
    )
    return StepMemory(exp_avg, exp_avg_sq, torch.empty(min(CHUNK, buffers.numel), device=buffers.device))


@contextmanager
def changing(device: torch.device) -> Iterator[None]:
    """Inside, a step changes numbers in place: an error would leave it half-made. Raises DeviceFault instead, and the
    next engine restores the model."""
    try:
        yield
    except Exception as error:  # such as a kernel that CUDA cannot load
        raise DeviceFault(f"{device} has failed in the middle of an optimizer step: {error}") from error


@torch.no_grad()
def _take_step(buffers: Buffers, params: AdamParams, memory: StepMemory, norm: float) -> dict[str, float]:
    """Step and clear the gradient, whose norm (over all ranks) is `norm`. Returns the metrics. Allocates nothing."""
    gradient = buffers.gradient
    assert gradient is not None
    step = buffers.step + 1
    clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
    with changing(buffers.device):
        for weights, place in buffers.chunks(CHUNK):
            if clip != 1.0:
                gradient[place].mul_(clip)
            moments = memory.exp_avg[place], memory.exp_avg_sq[place]
            _step_chunk(weights, gradient[place], *moments, memory.scratch, step, params)
    buffers.exp_avg, buffers.exp_avg_sq = memory.exp_avg, memory.exp_avg_sq
    buffers.gradient, buffers.step = None, step
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


LARGEST = 1e16
"""Larger learning rates, decays and eps are refused: the factors of a step would not fit into float32, and torch would
raise in the middle of a step that works in place."""


LEAST_EPS = 2.0**-126
"""The smallest normal number of float32. A smaller eps is refused: it may become 0 in float32, and a step then computes
0 / 0 where a gradient is zero."""


def check_adam(params: AdamParams) -> None:
    """Raise InvalidRequest for invalid hyper-parameters."""
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(params, name) < 1:
            raise InvalidRequest(f"adam_params.{name}: must be in [0, 1), got {getattr(params, name)}")
    for name in ("learning_rate", "weight_decay"):
        value = getattr(params, name)
        if not 0 <= value <= LARGEST:
            raise InvalidRequest(f"adam_params.{name}: must be in [0, {LARGEST:g}], got {value}")
    if not (math.isfinite(params.grad_clip_norm) and params.grad_clip_norm >= 0):
        raise InvalidRequest(
            f"adam_params.grad_clip_norm: must be a finite number of at least 0, got {params.grad_clip_norm}"
        )
    if not LEAST_EPS <= params.eps <= LARGEST:
        raise InvalidRequest(f"adam_params.eps: must be in [{LEAST_EPS:g}, {LARGEST:g}], got {params.eps}")
