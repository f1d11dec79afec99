"""The functions of `between` as Triton kernels for CUDA: each is one kernel, which reads and writes every tensor once.

Arithmetic is float32; each result is rounded once. Rows may lie apart, as in a slice of columns; the elements of a row
(or of a head) lie side by side. A kernel is compiled once for each width, number of heads and dtype, and for no number
of rows. Importing this module needs the package triton, and calling its functions CUDA or Triton's interpreter.

liger-kernel 0.8.0 has kernels for the same formulas. They do not fit here:
- The backward of its norms also computes the gradient of the weight, which is frozen here: three kernels more. That of
  its norm with a residual is compiled anew for each number of rows.
- Its swiglu takes the rows of gate and up to lie side by side, and its backward does not give the product again.
- Its rotary embeddings overwrite queries and keys, and do not norm the heads.
- Its norms call CUDA's own rsqrt, which Triton's interpreter lacks, so that no test on a CPU could run them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyrl.trainer.kernels.between import Between

_SWIGLU_COLUMNS = 1024
_ROTATED_ELEMENTS = 1024
"""How many elements of each half of some heads one program turns. With more, 16 for each thread, ptxas spills."""
_GROUPED_TILE = 64
"""Rows and columns of one program. With 128 columns a thread needs twice the registers."""


@triton.jit
def _read(place, mask):
    return tl.load(place, mask=mask, other=0).to(tl.float32)


@triton.jit
def _write(place, values, mask):
    tl.store(place, values.to(place.dtype.element_ty), mask=mask)


@triton.jit
def norm_kernel(
    x,
    x_row,
    residual,
    residual_row,
    weight,
    y,
    rstd,
    eps,
    n: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_RSTD: tl.constexpr,
):
    """y = x rstd weight of one row. ADDS: x += residual before that. HAS_RSTD: rstd is read, else it is written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    values = _read(x + row * x_row + column, mask)
    if ADDS:
        values += _read(residual + row * residual_row + column, mask)
        values = values.to(x.dtype.element_ty)
        tl.store(x + row * x_row + column, values, mask=mask)
        values = values.to(tl.float32)
    if HAS_RSTD:
        scale = tl.load(rstd + row)
    else:
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / n + eps)
        tl.store(rstd + row, scale)
    scaled = values * scale * _read(weight + column, mask)
    _write(y + row * n + column, scaled, mask)


@triton.jit
def norm_backward_kernel(
    gradient, gradient_row, x, x_row, weight, rstd, residual, residual_row, n: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of `between.rms_norm_backward`, in the memory of `gradient`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    place = gradient + row * gradient_row + column
    of_product = _read(place, mask) * _read(weight + column, mask)
    values = _read(x + row * x_row + column, mask)
    scale = tl.load(rstd + row)
    along = tl.sum(of_product * values, axis=0) * scale * scale * scale / n
    result = of_product * scale - values * along
    result += _read(residual + row * residual_row + column, mask)
    _write(place, result, mask)


@triton.jit
def rotate_kernel(
    x,
    x_row,
    x_head,
    weight,
    cos,
    cos_row,
    sin,
    sin_row,
    y,
    rstd,
    eps,
    heads: tl.constexpr,
    half: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
):
    """`between.rotated` of HEADS heads of one row. NORMS: with the norm of each head before."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    in_half = column < half
    mask = (head < heads) & in_half
    place = x + row * x_row + head * x_head + column
    left = _read(place, mask)
    right = _read(place + half, mask)
    if NORMS:
        scale = tl.rsqrt(tl.sum(left * left + right * right, axis=1, keep_dims=True) / (2 * half) + eps)
        tl.store(rstd + row * heads + head, scale, mask=head < heads)
        left *= scale * _read(weight + column, in_half)
        right *= scale * _read(weight + half + column, in_half)
    cos += row * cos_row + column
    sin += row * sin_row + column
    of_left = left * _read(cos, in_half)
    of_left -= right * _read(sin, in_half)
    of_right = right * _read(cos + half, in_half)
    of_right += left * _read(sin + half, in_half)
    target = y + (row * heads + head) * (2 * half) + column
    _write(target, of_left, mask)
    _write(target + half, of_right, mask)


@triton.jit
def rotate_backward_kernel(
    gradient,
    gradient_row,
    gradient_head,
    x,
    x_row,
    x_head,
    weight,
    rstd,
    cos,
    cos_row,
    sin,
    sin_row,
    result,
    heads: tl.constexpr,
    half: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
):
    """`between.rotated_backward` of HEADS heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    in_half = column < half
    mask = (head < heads) & in_half
    place = gradient + row * gradient_row + head * gradient_head + column
    of_left = _read(place, mask)
    of_right = _read(place + half, mask)
    cos += row * cos_row + column
    sin += row * sin_row + column
    left = of_left * _read(cos, in_half)
    left += of_right * _read(sin, in_half)
    right = of_right * _read(cos + half, in_half)
    right -= of_left * _read(sin + half, in_half)
    if NORMS:
        place = x + row * x_row + head * x_head + column
        x_left = _read(place, mask)
        x_right = _read(place + half, mask)
        scale = tl.load(rstd + row * heads + head, mask=head < heads, other=0)
        left *= _read(weight + column, in_half)
        right *= _read(weight + half + column, in_half)
        along = tl.sum(left * x_left + right * x_right, axis=1, keep_dims=True) * scale * scale * scale / (2 * half)
        left = left * scale - x_left * along
        right = right * scale - x_right * along
    target = result + (row * heads + head) * (2 * half) + column
    _write(target, left, mask)
    _write(target + half, right, mask)


@triton.jit
def swiglu_kernel(gate, gate_row, up, up_row, y, n: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row of silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    gated = _read(gate + row * gate_row + column, mask)
    gated *= tl.sigmoid(gated)
    gated *= _read(up + row * up_row + column, mask)
    _write(y + row * n + column, gated, mask)


@triton.jit
def swiglu_backward_kernel(gradient, gradient_row, gate, gate_row, up, up_row, n: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row of the gradients of gate and up, in the memory of `gate` and `gradient`, and of the
    product, in that of `up`.

    The derivative of silu(g) is s (1 + g (1 - s)) with s = sigmoid(g)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    place = gradient + row * gradient_row + column
    of_product = _read(place, mask)
    of_gate, of_up = gate + row * gate_row + column, up + row * up_row + column
    gated, factor = _read(of_gate, mask), _read(of_up, mask)
    sigmoid = tl.sigmoid(gated)
    slope = sigmoid * (1 + gated * (1 - sigmoid))
    _write(of_gate, of_product * factor * slope, mask)
    _write(place, of_product * gated * sigmoid, mask)
    _write(of_up, gated * sigmoid * factor, mask)


@triton.jit(do_not_specialize=["groups"])
def add_grouped_kernel(
    out,
    out_row,
    x,
    x_row,
    matrices,
    matrices_group,
    matrices_row,
    matrices_column,
    ends,
    groups,
    n: tl.constexpr,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """`between.add_grouped` of ROWS rows and COLUMNS columns, DEPTH numbers of a sum at a time: a product for each
    group that has some of the rows. Of each only its own rows are taken: others' may be not finite."""
    first = tl.program_id(0) * ROWS
    x += first.to(tl.int64) * x_row
    out += first.to(tl.int64) * out_row  # rows * columns may be above 2^31
    own_row = tl.arange(0, ROWS)
    row = first + own_row
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < n
    group = 0
    past = 0
    for of_groups in range(0, groups, GROUPS):
        place = of_groups + tl.arange(0, GROUPS)
        end = tl.load(ends + place, mask=place < groups, other=2147483647)
        group += tl.sum((end <= first).to(tl.int32), axis=0)
        past += tl.sum((end < first + ROWS).to(tl.int32), axis=0)
    past = tl.minimum(past + 1, groups)
    rows = tl.load(ends + groups - 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for each in range(group, past):
        begin = tl.load(ends + each - 1, mask=each > 0, other=0)
        is_own = ((row >= begin) & (row < tl.load(ends + each)))[:, None]
        matrix = matrices + tl.cast(each, tl.int64) * matrices_group + column[None, :] * matrices_column
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for of_sum in range(0, k, DEPTH):
            depth = of_sum + tl.arange(0, DEPTH)
            own = tl.load(x + own_row[:, None] * x_row + depth[None, :], mask=is_own & (depth < k)[None, :], other=0)
            of_group = (depth < k)[:, None] & in_columns[None, :]
            factors = tl.load(matrix + depth[:, None] * matrices_row, mask=of_group, other=0)
            part = tl.dot(own, factors, part, input_precision="ieee")
        total = tl.where(is_own, part, total)
    place = out + own_row[:, None] * out_row + column[None, :]
    mask = (row < rows)[:, None] & in_columns[None, :]
    _write(place, _read(place, mask) + total, mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `between.rms_norm`."""
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return _norm(x, None, weight, rstd, eps, has_rstd=False), rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `between.add_rms_norm`; the total is in the memory of x."""
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return x, _norm(x, residual, weight, rstd, eps, has_rstd=False), rstd


def normed(x: Tensor, weight: Tensor, rstd: Tensor, eps: float) -> Tensor:
    """As `between.normed`: the bits of `rms_norm` of this module."""
    return _norm(x, None, weight, rstd, eps, has_rstd=True)


def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor) -> Tensor:
    """As `between.rms_norm_backward`; the result is in the memory of `gradient`."""
    rows, n = x.shape
    arguments = gradient, _row(gradient), x, _row(x), weight, rstd, residual, _row(residual)
    norm_backward_kernel[(rows,)](*arguments, **_norm_options(n))
    return gradient


def rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `between.rotated`."""
    rows, heads, n = x.shape
    y = x.new_empty(x.shape)
    rstd = None if weight is None else x.new_empty((rows, heads), dtype=torch.float32)
    options = _rotate_options(heads, n, NORMS=weight is not None)
    arguments = x, _row(x), x.stride(1), weight, cos, _row(cos), sin, _row(sin), y, rstd, eps
    grid = rows, triton.cdiv(heads, options["HEADS"])
    rotate_kernel[grid](*arguments, **options)
    return y, rstd


def rotated_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, cos: Tensor, sin: Tensor
) -> Tensor:
    """As `between.rotated_backward`."""
    rows, heads, n = gradient.shape
    result = gradient.new_empty(gradient.shape)
    options = _rotate_options(heads, n, NORMS=weight is not None)
    of_x = gradient, _row(gradient), gradient.stride(1), x, _row(x), x.stride(1), weight, rstd
    arguments = *of_x, cos, _row(cos), sin, _row(sin), result
    grid = rows, triton.cdiv(heads, options["HEADS"])
    rotate_backward_kernel[grid](*arguments, **options)
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `between.swiglu`."""
    rows, n = gate.shape
    y = gate.new_empty(gate.shape)
    options = _swiglu_options(n)
    swiglu_kernel[(rows, triton.cdiv(n, options["BLOCK"]))](gate, _row(gate), up, _row(up), y, **options)
    return y


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `between.swiglu_backward`; the results are in the memory of gate, of `gradient` and of up."""
    rows, n = gate.shape
    options = _swiglu_options(n)
    arguments = gradient, _row(gradient), gate, _row(gate), up, _row(up)
    swiglu_backward_kernel[(rows, triton.cdiv(n, options["BLOCK"]))](*arguments, **options)
    return gate, gradient, up


def add_grouped(out: Tensor, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """As `between.add_grouped`, but each sum is rounded once."""
    (rows, n), (groups, k, _) = out.shape, matrices.shape
    kernel: Any = add_grouped_kernel
    tile, depth = _GROUPED_TILE, max(triton.next_power_of_2(k), 16)
    options = {"n": n, "k": k, "ROWS": tile, "COLUMNS": tile, "DEPTH": min(tile, depth), "GROUPS": 64}
    if rows:
        grid = triton.cdiv(rows, tile), triton.cdiv(n, tile)
        kernel[grid](out, _row(out), x, _row(x), matrices, *matrices.stride(), ends, groups, num_warps=8, **options)
    return out


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, rstd: Tensor, eps: float, *, has_rstd: bool) -> Tensor:
    rows, n = x.shape
    y = x.new_empty(x.shape)
    residual_row = 0 if residual is None else _row(residual)
    arguments = x, _row(x), residual, residual_row, weight, y, rstd, eps
    norm_kernel[(rows,)](*arguments, **_norm_options(n, ADDS=residual is not None, HAS_RSTD=has_rstd))
    return y


def _row(x: Tensor) -> int:
    """From one row to the next, in elements."""
    assert x.stride(-1) == 1, "elements of a row lie apart"
    return x.stride(0)


def _norm_options(n: int, **flags: bool) -> dict[str, Any]:
    """Eight elements (16 bytes of bfloat16) for each thread, up to 512 threads."""
    block = triton.next_power_of_2(n)
    return {"n": n, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16), **flags}


def _rotate_options(heads: int, n: int, **flags: bool) -> dict[str, Any]:
    half = triton.next_power_of_2(n // 2)
    together = min(triton.next_power_of_2(heads), max(_ROTATED_ELEMENTS // half, 1))
    warps = max(together * half // 128, 1)
    return {"heads": heads, "half": n // 2, "HEADS": together, "HALF": half, "num_warps": warps, **flags}


def _swiglu_options(n: int) -> dict[str, Any]:
    block = min(triton.next_power_of_2(n), _SWIGLU_COLUMNS)
    return {"n": n, "BLOCK": block, "num_warps": max(block // 256, 1)}


IN_TRITON = Between(
    rms_norm, add_rms_norm, normed, rms_norm_backward, rotated, rotated_backward, swiglu, swiglu_backward, add_grouped
)
