"""A frozen linear layer and the low-rank updates of adapters, each on its own rows, as one operation of autograd.

The base model's product is one product over all rows. Each adapter's update is added to its slice of the result in
place: no row is copied, and no zeros are computed for rows without an adapter. Only the input and the low-rank rows are
kept for the backward. Each gradient comes from the rows of its own adapter alone, so numbers that are not finite stay
with their tenant. Knows nothing of modules or passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowsUpdate(NamedTuple):
    """scale * (x A^T) B^T for rows [start, stop). lora_a [rank, in_features], lora_b [out_features, rank]."""

    start: int
    stop: int
    scale: float
    lora_a: Tensor
    lora_b: Tensor


def linear_with_updates(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[RowsUpdate]) -> Tensor:
    """x W^T + bias, plus the updates. x: [..., in_features], whose flattened rows the updates name; returns
    [..., out_features] in x's dtype. Gradients go to x and to the adapters' matrices, never to weight or bias."""
    matrices = [matrix for update in updates for matrix in update[3:]]  # autograd sees no tensors inside a list
    return _Product.apply(x, weight, bias, updates, *matrices)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[RowsUpdate], *matrices: Tensor
    ) -> Tensor:
        output = torch.nn.functional.linear(x, weight, bias)
        rows, of_rows = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        kept: list[Tensor] = []
        for start, stop, scale, lora_a, lora_b in updates:
            lora_a, lora_b = lora_a.to(x.dtype), lora_b.to(x.dtype)
            low_rank = torch.mm(_rows(rows, start, stop), lora_a.t()).mul_(scale)
            _rows(of_rows, start, stop).addmm_(low_rank, lora_b.t())
            kept += [lora_a, lora_b, low_rank]
        ctx.save_for_backward(x, weight, *kept)
        ctx.places = [update[:3] for update in updates]
        return output  # no view: OLMo clamps it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        rows = x.reshape(-1, weight.shape[1])
        of_rows = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        of_matrices: list[Tensor] = []
        each = iter(kept)
        for start, stop, scale in ctx.places:
            lora_a, lora_b, low_rank = next(each), next(each), next(each)
            of_output = _rows(grad, start, stop)
            of_low_rank = torch.mm(of_output, lora_b).mul_(scale)
            of_matrices.append(torch.mm(of_low_rank.t(), _rows(rows, start, stop)))
            of_matrices.append(torch.mm(of_output.t(), low_rank))
            if of_rows is not None:
                _rows(of_rows, start, stop).addmm_(of_low_rank, lora_a)
        return None if of_rows is None else of_rows.view(x.shape), None, None, None, *of_matrices


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """A slice of rows. Without a view for all rows: a view costs as much as a small product."""
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]
