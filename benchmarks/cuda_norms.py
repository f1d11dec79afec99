"""torch's RMS norm as one operation forward and one backward, as CUDA has it: on a CPU it is made of others.

`benchmarks.operations` counts with it what a GPU would get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

_torch_rms_norm = functional.rms_norm


@torch.library.custom_op("skyrl_benchmarks::rms_norm", mutates_args=())
def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _torch_rms_norm(x, weight.shape, weight, eps)


@torch.library.custom_op("skyrl_benchmarks::rms_norm_backward", mutates_args=())
def _backward(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    numbers, of_product = x.float(), gradient.float() * weight.float()
    scale = torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)
    along = (of_product * numbers).mean(-1, keepdim=True)
    return (scale * (of_product - numbers * scale.square() * along)).to(x.dtype)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _backward(gradient, *ctx.saved_tensors, ctx.eps), None, None


_forward.register_autograd(_gradient, setup_context=_keep)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    return _forward(x, weight, eps)


def norms_as_on_cuda() -> Any:
    """A patch of torch's function. The weight gets no gradient: the base model is frozen."""
    return patch.object(functional, "rms_norm", _rms_norm)
