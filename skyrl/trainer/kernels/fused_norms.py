"""The functions of `Between` with torch's RMS norm, which on CUDA is one kernel forward and one backward.

Of all ways with torch's own operations it is the one that starts the fewest. Knows formulas. Knows nothing of layers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from skyrl.trainer.kernels.between import IN_TORCH, Between, add_grouped, rotate


def norm_kernel(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y as x, and rstd, float32 [..., 1]."""
    return torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)


def norm_kernel_backward(gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of x. rstd: of `norm_kernel`."""
    shape = [x.shape[-1]]
    return torch.ops.aten._fused_rms_norm_backward(gradient, x, shape, rstd, weight, [True, False])[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `between.rms_norm`, but rstd is [..., 1]."""
    return norm_kernel(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `between.add_rms_norm`."""
    total = x.add_(residual)
    return total, *norm_kernel(total, weight, eps)


def normed(x: Tensor, weight: Tensor, rstd: Tensor, eps: float) -> Tensor:
    """As `between.normed`."""
    return norm_kernel(x, weight, eps)[0]


def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor) -> Tensor:
    """As `between.rms_norm_backward`."""
    return norm_kernel_backward(gradient, x, weight, rstd).add_(residual)


def rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `between.rotated`."""
    rstd = None
    if weight is not None:
        x, rstd = norm_kernel(x, weight, eps)
    return rotate(x, cos, sin, torch.empty_like(x)), rstd


def rotated_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, cos: Tensor, sin: Tensor
) -> Tensor:
    """As `between.rotated_backward`."""
    turned = rotate(gradient, cos, sin, torch.empty(x.shape, dtype=x.dtype, device=x.device), back=True)
    return turned if weight is None or rstd is None else norm_kernel_backward(turned, x, weight, rstd)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `between.swiglu`."""
    return functional.silu(gate).mul_(up)


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `between.swiglu_backward`."""
    silu = functional.silu(gate)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return of_gate, gradient.mul_(silu), silu.mul_(up)


WITH_FUSED_NORMS = Between(
    rms_norm, add_rms_norm, normed, rms_norm_backward, rotated, rotated_backward, swiglu, swiglu_backward, add_grouped
)


def in_torch(device: torch.device) -> Between:
    """With torch's own operations, on this device."""
    return WITH_FUSED_NORMS if device.type == "cuda" else IN_TORCH
