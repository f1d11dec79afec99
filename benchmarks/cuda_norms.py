"""torch's RMS norm as one operation forward and one backward, as CUDA has it: on a CPU it is made of others.

`benchmarks.operations` counts with it what a GPU would get.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from skyrl.trainer.kernels import fused_norms


@torch.library.custom_op("skyrl_benchmarks::rms_norm", mutates_args=())
def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)


@torch.library.custom_op("skyrl_benchmarks::rms_norm_backward", mutates_args=())
def _backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    numbers, of_product = x.float(), gradient.float() * weight.float()
    scale = scale.view(*x.shape[:-1], 1)
    along = (of_product * numbers).mean(-1, keepdim=True)
    return (scale * (of_product - numbers * scale.square() * along)).to(x.dtype)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _gradient(ctx: Any, gradient: Tensor, of_scale: Tensor) -> tuple[Tensor, None, None]:
    return _backward(gradient, *ctx.saved_tensors), None, None


_forward.register_autograd(_gradient, setup_context=_keep)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    return _forward(x, weight, eps)[0]


@contextmanager
def norms_as_on_cuda() -> Iterator[None]:
    """Inside, both are one operation each. Weights get no gradient: the base model is frozen."""
    with (
        patch.object(functional, "rms_norm", _rms_norm),
        patch.object(fused_norms, "norm_kernel", _forward),
        patch.object(fused_norms, "norm_kernel_backward", _backward),
    ):
        yield
