"""A causal convolution of each channel along packed rows, and its gradients.

Each row is a weighted sum of itself and a few rows before it, of which those that begin a sequence have fewer. No
number depends on other rows. Only the input is kept for the backward. Knows nothing of segments or modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, firsts: Tensor, before: Tensor, *, silu: bool
) -> Tensor:
    """x: [rows, channels]; weight: [channels, width], the last column for the row itself; bias: [channels]. before:
    int64 [firsts, width - 1 or more], for each of the rows `firsts` the rows that it reads, the nearest first, -1 for
    none. Other rows read those that lie before them. With `silu`, that of the sums. Returns [rows, channels] in x's
    dtype; computes in float32."""
    made: Tensor = _Convolution.apply(x, weight, bias, firsts, before[:, : weight.shape[1] - 1], silu)
    return made


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, firsts: Tensor, before: Tensor, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, firsts, before)
        ctx.silu = silu
        made = _sums(x, weight, bias, firsts, before)
        return (torch.nn.functional.silu(made, inplace=True) if silu else made).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, firsts, before = ctx.saved_tensors
        gradient = gradients[0].float()
        if ctx.silu:
            sums = _sums(x, weight, bias, firsts, before)
            gradient = torch.ops.aten.silu_backward(gradient, sums)
            del sums
        columns = weight.float().unbind(1)[::-1]
        of_x = of_weight = of_bias = None
        inner = gradient.index_fill(0, firsts, 0.0)  # of the rows that read those that lie before them
        begin = gradient.index_select(0, firsts)
        if ctx.needs_input_grad[0]:
            of_x = gradient * columns[0]
            for distance, column in enumerate(columns[1:], start=1):
                of_x[:-distance].addcmul_(inner[distance:], column)
            for column, read in zip(columns[1:], before.unbind(1), strict=True):
                of_x.index_add_(0, read.clamp(min=0), (begin * column).masked_fill_(read[:, None] < 0, 0.0))
            of_x = of_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(x, gradient, inner, begin, before).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0).to(bias.dtype)
        return of_x, of_weight, of_bias, None, None, None


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, firsts: Tensor, before: Tensor) -> Tensor:
    """float32 [rows, channels]."""
    rows = x.float()
    columns = weight.float().unbind(1)[::-1]
    made = rows * columns[0]
    for distance, column in enumerate(columns[1:], start=1):
        made[distance:].addcmul_(rows[:-distance], column)
    begin = rows.index_select(0, firsts) * columns[0]
    for column, read in zip(columns[1:], _read(rows, before), strict=True):
        begin.addcmul_(read, column)
    made.index_copy_(0, firsts, begin)
    return made if bias is None else made.add_(bias.float())


def _read(rows: Tensor, before: Tensor) -> Sequence[Tensor]:
    """For each distance, the rows that the first ones read, zeros for none: [firsts, channels]."""
    return [rows.index_select(0, read.clamp(min=0)).masked_fill_(read[:, None] < 0, 0.0) for read in before.unbind(1)]


def _of_weight(x: Tensor, gradient: Tensor, inner: Tensor, begin: Tensor, before: Tensor) -> Tensor:
    rows = x.float()
    columns = [(rows * gradient).sum(0)]
    for distance, read in enumerate(_read(rows, before), start=1):
        columns.append((rows[:-distance] * inner[distance:]).sum(0) + (read * begin).sum(0))
    return torch.stack(columns[::-1], dim=1)
