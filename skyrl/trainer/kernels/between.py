"""The operations between the matrix products of a decoder layer, in plain torch, forward and backward.

No autograd: a layer's pieces (`model.layer_pieces`) call the backward themselves. Each function makes as few passes
over its tensors as torch's operations allow. `Between` names the functions, so that a GPU's kernels can take their
place (`kernels.fused`). Knows formulas. Knows nothing of layers, adapters or rows' meaning.

All tensors of a call are on one device and of one dtype, float32 or bfloat16, but rstd, which is float32. Inside, sums
are float32. R: rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Between:
    """The functions of this module, or kernels that take their place and compute the same up to rounding."""

    rms_norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    normed: Callable[[Tensor, Tensor, Tensor], Tensor]
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    rotated: Callable[[Tensor, Tensor | None, float, Tensor, Tensor], tuple[Tensor, Tensor | None]]
    rotated_backward: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x rstd weight with rstd = 1 / sqrt(mean(x^2) + eps) of each row ("Root Mean Square Layer Normalization", arXiv
    1910.07467). x [R, n], weight [n]; returns y [R, n], and rstd [R]."""
    rstd = _rstd(x, eps)
    return normed(x, weight, rstd), rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + residual, then `rms_norm` of that sum: total [R, n], y [R, n], rstd [R]. The memory of x may be that of
    total."""
    total = x.add_(residual)
    return total, *rms_norm(total, weight, eps)


def normed(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """y of `rms_norm` again, with the same bits."""
    return (x.float() * rstd[..., None]).to(x.dtype).mul_(weight)


def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor) -> Tensor:
    """The gradient of x from those of y, [R, n], plus `residual` [R, n], that of x on another way. The memory of
    `gradient` may be that of the result. The weight gets none.

    With g = gradient * weight: rstd g - x rstd^3 mean(g x)."""
    of_product = gradient.mul_(weight).float()
    along = torch.linalg.vecdot(of_product, x.float()).mul_(rstd.pow(3)).div_(-x.shape[-1])
    result = torch.addcmul(residual.float(), of_product, rstd[..., None])
    return result.addcmul_(x.float(), along[..., None]).to(x.dtype)


def rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """The heads of queries or keys with rotary embeddings of their halves ("RoFormer", arXiv 2104.09864, in the layout
    of Llama); before that, `rms_norm` of each head, if there is a weight [n].

    x [R, heads, n], whose rows may lie apart; cos and sin [R, n]; returns y [R, heads, n], and rstd [R, heads]."""
    rstd = None
    if weight is not None:
        rstd = _rstd(x, eps)
        x = normed(x, weight, rstd)
    return _rotate(x, cos, sin), rstd


def rotated_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, cos: Tensor, sin: Tensor
) -> Tensor:
    """The gradient of x of `rotated` from that of y, [R, heads, n]. The turn back is the turn by the other angle."""
    turned = _rotate(gradient, cos, -sin)
    if weight is None or rstd is None:
        return turned
    of_product = turned.mul_(weight).float()
    along = torch.linalg.vecdot(of_product, x.float()).mul_(rstd.pow(3)).div_(-x.shape[-1])
    return of_product.mul_(rstd[..., None]).addcmul_(x.float(), along[..., None]).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up ("GLU Variants Improve Transformer", arXiv 2002.05202). All [R, n]."""
    return functional.silu(gate).mul_(up)


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of `swiglu`, all [R, n]. The memory of `gradient` may be that of a
    result."""
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return of_gate, gradient.mul_(functional.silu(gate))


def _rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, float32."""
    return torch.linalg.vecdot(x.float(), x.float()).div_(x.shape[-1]).add_(eps).rsqrt_()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (-x_2, x_1) sin, where x_1 and x_2 are the halves of x [R, heads, n]."""
    half = x.shape[-1] // 2
    sin = sin[:, None]
    result = x * cos[:, None]
    result[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    result[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return result


IN_TORCH = Between(
    rms_norm, add_rms_norm, normed, rms_norm_backward, rotated, rotated_backward, swiglu, swiglu_backward
)
