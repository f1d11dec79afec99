"""A frozen linear layer and the low-rank updates of adapters, each on its own rows, as one operation of autograd.

The base model's product is one product over all rows. Each adapter's update is added to its slice of the result in
place: no row is copied, and no zeros are computed for rows without an adapter. Only the input and the low-rank rows are
kept for the backward. Each gradient comes from the rows of its own adapter alone, so numbers that are not finite stay
with their tenant. On CUDA, where each operation costs the host more than a small product costs the GPU, adapters are
updated together by grouped products. Knows nothing of modules or passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from skyrl.training.backends.torch_lora.expert_product import of_used_experts

Activation = Callable[[Tensor], Tensor]

GROUPED_RANKS = 8
"""`grouped_mm` takes rows that begin at multiples of 16 bytes: in bfloat16, ranks that are multiples of this."""


class RowsUpdate(NamedTuple):
    """scale * (x A^T) B^T for rows [start, stop). lora_a [rank, in_features], lora_b [out_features, rank]."""

    start: int
    stop: int
    scale: float
    lora_a: Tensor
    lora_b: Tensor


class StackedUpdate(NamedTuple):
    """The updates (x A^T) B^T of several adapters, whose rows lie one after the other in [start, stop). lora_a
    [adapters, rank, in_features], lora_b [adapters, out_features, rank], with the scales in it. ends: int32 [adapters],
    where the rows of each end, counted from `start`. `may_lack_rows`: an adapter may have none of the rows."""

    start: int
    stop: int
    lora_a: Tensor
    lora_b: Tensor
    ends: Tensor
    may_lack_rows: bool = False


Update = RowsUpdate | StackedUpdate


def groups_adapters(device: torch.device) -> bool:
    """Whether adapters are updated together. On a CPU one product for each adapter is as quick, and needs no sum."""
    return device.type == "cuda"


def linear_with_updates(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]) -> Tensor:
    """x W^T + bias, plus the updates. x: [..., in_features], whose flattened rows the updates name; returns
    [..., out_features] in x's dtype. Gradients go to x and to the adapters' matrices, never to weight or bias."""
    # autograd sees no tensors inside a list
    matrices = [matrix for update in updates for matrix in (update.lora_a, update.lora_b)]
    return _Product.apply(x, weight, bias, updates, *matrices)


def gated_linear_with_updates(
    gate: Tensor, up: Tensor, activation: Activation, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]
) -> Tensor:
    """`linear_with_updates` of activation(gate) * up, with the same bits. Only gate and up are kept for the backward,
    which computes the input again: two of an MLP's four wide tensors, 39 % of what a layer of Qwen2.5-0.5B keeps."""
    matrices = [matrix for update in updates for matrix in (update.lora_a, update.lora_b)]
    return _GatedProduct.apply(gate, up, activation, weight, bias, updates, *matrices)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[Update], *matrices: Tensor
    ) -> Tensor:
        output, kept = _computed(x, weight, bias, updates)
        ctx.save_for_backward(x, weight, *kept)
        ctx.updates = [update._replace(lora_a=None, lora_b=None) for update in updates]
        return output  # no view: OLMo clamps it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved_tensors
        of_x, of_matrices = _gradients(grads[0], x, weight, ctx.updates, kept, of_input=ctx.needs_input_grad[0])
        return of_x, None, None, None, *of_matrices


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        weight: Tensor,
        bias: Tensor | None,
        updates: Sequence[Update],
        *matrices: Tensor,
    ) -> Tensor:
        output, kept = _computed(activation(gate) * up, weight, bias, updates)
        ctx.save_for_backward(gate, up, weight, *kept)
        ctx.activation = activation
        ctx.updates = [update._replace(lora_a=None, lora_b=None) for update in updates]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up, weight, *kept = ctx.saved_tensors
        of_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            activated = ctx.activation(leaf)
        x = activated.detach() * up
        of_x, of_matrices = _gradients(grads[0], x, weight, ctx.updates, kept, of_input=of_input)
        if of_x is None:
            return None, None, None, None, None, None, *of_matrices
        (of_gate,) = torch.autograd.grad(activated, leaf, of_x * up)
        return of_gate, of_x.mul_(activated.detach()), None, None, None, None, *of_matrices


def _computed(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]) -> tuple[Tensor, list[Tensor]]:
    """x W^T + bias plus the updates, and what the backward needs of them: three tensors of each update."""
    output = torch.nn.functional.linear(x, weight, bias)
    rows, of_rows = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    kept: list[Tensor] = []
    for update in updates:
        lora_a, lora_b = update.lora_a.to(x.dtype), update.lora_b.to(x.dtype)
        own, of_own = _rows(rows, update), _rows(of_rows, update)
        if isinstance(update, StackedUpdate):
            low_rank = grouped_mm(own, lora_a.transpose(1, 2), offs=update.ends)
            of_own.add_(grouped_mm(low_rank, lora_b.transpose(1, 2), offs=update.ends))
        else:
            low_rank = torch.mm(own, lora_a.t()).mul_(update.scale)
            of_own.addmm_(low_rank, lora_b.t())
        kept += [lora_a, lora_b, low_rank]
    return output, kept


def _gradients(
    of_output: Tensor, x: Tensor, weight: Tensor, updates: Sequence[Update], kept: Sequence[Tensor], *, of_input: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of x (None without `of_input`) and of each update's two matrices. `kept`: of `_computed`."""
    grad = of_output.reshape(-1, weight.shape[0])
    rows = x.reshape(-1, weight.shape[1])
    of_rows = torch.mm(grad, weight) if of_input else None
    of_matrices: list[Tensor] = []
    each = iter(kept)
    for update in updates:
        lora_a, lora_b, low_rank = next(each), next(each), next(each)
        own, of_own = _rows(rows, update), _rows(grad, update)
        if isinstance(update, StackedUpdate):
            ends, of_own = update.ends, of_own.contiguous()
            of_low_rank = grouped_mm(of_own, lora_b, offs=ends)
            pair = [grouped_mm(of_low_rank.t(), own, offs=ends), grouped_mm(of_own.t(), low_rank, offs=ends)]
            of_matrices += [of_used_experts(matrix, ends) for matrix in pair] if update.may_lack_rows else pair
            if of_rows is not None:
                _rows(of_rows, update).add_(grouped_mm(of_low_rank, lora_a, offs=ends))
        else:
            of_low_rank = torch.mm(of_own, lora_b).mul_(update.scale)
            of_matrices.append(torch.mm(of_low_rank.t(), own))
            of_matrices.append(torch.mm(of_own.t(), low_rank))
            if of_rows is not None:
                _rows(of_rows, update).addmm_(of_low_rank, lora_a)
    return None if of_rows is None else of_rows.view(x.shape), of_matrices


def _rows(tensor: Tensor, update: Update) -> Tensor:
    """The update's rows. Without a view for all rows: a view costs as much as a small product."""
    start, stop = update.start, update.stop
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]
