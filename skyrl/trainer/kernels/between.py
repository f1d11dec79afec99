"""The operations between the matrix products of a decoder layer, in plain torch, forward and backward; and the sum of a
product and that of groups of rows with small matrices.

No autograd: a layer's pieces (`model.layer_pieces`) call the backward themselves. `Between` names the functions, so
that a GPU's kernels can take their place. On a CPU rows go through a function's operations in blocks that stay in the
processor's cache: on all of 4,096 rows at once an operation takes some three times as long for each number. Knows
formulas. Knows nothing of layers, adapters or rows' meaning.

All tensors of a call are on one device and of one dtype, float32 or bfloat16, but rstd, which is float32, and `ends`.
Inside, sums are float32. R: rows. What is called a gradient may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

BLOCK = 2**16
"""Numbers of a block on a CPU: 256 KiB in float32, of which three fit into a second-level cache of 1 MiB."""


AddGrouped = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Between:
    """The functions of this module, or kernels that take their place and compute the same up to rounding."""

    rms_norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    normed: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    rotated: Callable[[Tensor, Tensor | None, float, Tensor, Tensor], tuple[Tensor, Tensor | None]]
    rotated_backward: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    add_grouped: AddGrouped


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x rstd weight with rstd = 1 / sqrt(mean(x^2) + eps) of each row ("Root Mean Square Layer Normalization", arXiv
    1910.07467). x [R, n], weight [n]; returns y [R, n], and rstd [R]."""
    rstd = _rstd(x, eps)
    return normed(x, weight, rstd, eps), rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + residual, then `rms_norm` of that sum: total [R, n], y [R, n], rstd [R]. The memory of x may be that of
    total."""
    total = x.add_(residual)
    return total, *rms_norm(total, weight, eps)


def normed(x: Tensor, weight: Tensor, rstd: Tensor, eps: float) -> Tensor:
    """y of `rms_norm` again, with the same bits. x [R, n], weight [n], rstd [R]; returns [R, n]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for own_x, own_rstd, own_y in blocks(x, rstd, y):
        _scaled(own_x, own_rstd, own_y).mul_(weight)
    return y


def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor) -> Tensor:
    """The gradient of x from that of y, [R, n], plus `residual` [R, n], that of x on another way. The weight gets none.

    With g = gradient * weight: rstd g - x rstd^3 mean(g x)."""
    for own, own_x, own_rstd, own_residual in blocks(gradient, x, rstd, residual):
        torch.add(_of_norm(own.mul_(weight), own_x, own_rstd), own_residual, out=own)
    return gradient


def rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """The heads of queries or keys with rotary embeddings of their halves ("RoFormer", arXiv 2104.09864, in the layout
    of Llama); before that, `rms_norm` of each head, if there is a weight [n].

    x [R, heads, n]; cos and sin [R, n]; returns y [R, heads, n], and rstd [R, heads]."""
    y = torch.empty_like(x)
    if weight is None:
        for own, own_cos, own_sin, own_y in blocks(x, cos, sin, y):
            rotate(own, own_cos, own_sin, own_y)
        return y, None
    rstd = _rstd(x, eps)
    for own, own_rstd, own_cos, own_sin, own_y in blocks(x, rstd, cos, sin, y):
        rotate(_scaled(own, own_rstd, torch.empty_like(own)).mul_(weight), own_cos, own_sin, own_y)
    return y, rstd


def rotated_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, cos: Tensor, sin: Tensor
) -> Tensor:
    """The gradient of x of `rotated` from that of y, [R, heads, n], whose rows and heads may lie apart; the result has
    memory of its own."""
    of_x = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    if weight is None or rstd is None:
        for own, own_cos, own_sin, turned in blocks(gradient, cos, sin, of_x):
            rotate(own, own_cos, own_sin, turned, back=True)
        return of_x
    for own, own_cos, own_sin, turned, own_x, own_rstd in blocks(gradient, cos, sin, of_x, x, rstd):
        rotate(own, own_cos, own_sin, turned, back=True)
        turned.copy_(_of_norm(turned.mul_(weight), own_x, own_rstd))
    return of_x


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up ("GLU Variants Improve Transformer", arXiv 2002.05202). All [R, n]."""
    y = torch.empty_like(gate)
    for own_gate, own_up, own in blocks(gate, up, y):
        torch.ops.aten.silu.out(own_gate, out=own).mul_(own_up)
    return y


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up from that of `swiglu`, and what `swiglu` gives, up to rounding; all [R, n]. Their
    memory may be that of the arguments: other memory would have to be fetched first.

    With s = sigmoid(gate), silu(gate) = s gate, and its derivative is s + silu(gate) (1 - s)."""
    for own, own_gate, own_up in blocks(gradient, gate, up):
        sigmoid = torch.sigmoid(own_gate)
        silu = own_gate * sigmoid
        slope = torch.addcmul(silu, sigmoid, 1 - silu)
        torch.mul(slope.mul_(own), own_up, out=own_gate)
        own.mul_(silu)
        own_up.mul_(silu)
    return gate, gradient, up


def add_grouped(out: Tensor, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """out += x M, in the memory of `out`, where each group of rows has a matrix M of its own.

    out [R, n], x [R, k], matrices [groups, k, n]; ends: int32 [groups], ascending, the row where each group ends. The
    last one is R; a group may have no rows."""
    return out.add_(grouped_mm(x, matrices, offs=ends))


def blocks(first: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Ranges of the rows of all tensors at once: on a CPU so many that the first one's numbers stay in the cache; all
    rows on a GPU, and for torch.compile."""
    if torch.compiler.is_compiling() or first.device.type != "cpu" or first.numel() <= BLOCK:
        return [(first, *others)]
    step = max(1, BLOCK * len(first) // first.numel())
    return zip(first.split(step), *(each.split(step) for each in others), strict=True)


def _rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _scaled(x: Tensor, rstd: Tensor, out: Tensor) -> Tensor:
    """x rstd, computed in float32 and rounded once; in `out`."""
    return torch.mul(x, rstd[..., None], out=out)


def _of_norm(of_product: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """rstd g - x rstd^3 mean(g x), float32, for g = of_product."""
    x, of_product = x.float(), of_product.float()
    along = torch.mul(of_product, x).sum(-1).mul_(rstd.pow(3)).div_(-x.shape[-1])
    return torch.mul(of_product, rstd[..., None]).addcmul_(x, along[..., None])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, back: bool = False) -> Tensor:
    """x cos + (-x_2, x_1) sin, where x_1 and x_2 are the halves of x [R, heads, n]; in `out`, which is not x. `back`:
    by the other angle."""
    half, sign = x.shape[-1] // 2, -1 if back else 1
    sin = sin[:, None]
    torch.mul(x, cos[:, None], out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


IN_TORCH = Between(
    rms_norm, add_rms_norm, normed, rms_norm_backward, rotated, rotated_backward, swiglu, swiglu_backward, add_grouped
)
