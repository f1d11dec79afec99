"""Tensors that one computation uses many times, with gradients that keep their precision in bfloat16, as on CUDA.

Autograd adds the gradients of all uses in the tensor's dtype, so it rounds after each. Of hundreds of uses the sum was
wrong by some percent. Knows nothing of what is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Reused:
    """The gradients of all uses of `tensor` are added in float32, and the sum is rounded once to the tensor's dtype.

    A float32 tensor, and one without a gradient, is used as it is. Of a bfloat16 tensor, too, the forward makes no
    copy. Its backward, of which there is one, has the sum from the second use on, or the first of a part, until the
    last: twice the tensor's bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._sums: list[Tensor] = []
        summed = tensor.dtype.itemsize < 4 and tensor.requires_grad and torch.is_grad_enabled()
        self._after: Tensor | None = _AfterUses.apply(tensor, self._sums) if summed else None

    def use(self, *place: slice) -> Tensor:
        """tensor[place]; the whole tensor without a place."""
        part = self._tensor[place] if place else self._tensor
        if self._after is None:
            return part
        return _Use.apply(self._after, part.detach(), self._sums, place, self._tensor.shape)


class _AfterUses(Function):
    """Gives an empty tensor that every use takes: so its backward runs after that of all uses."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sums: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.dtype = sums, tensor.dtype
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: None) -> tuple[Tensor, None]:
        return ctx.sums.pop().to(ctx.dtype), None


class _Use(Function):
    """Its gradient goes into `sums`, which has at most one tensor, and not along the graph."""

    @staticmethod
    def forward(
        ctx: Any, after: Tensor, part: Tensor, sums: list[Tensor], place: tuple[slice, ...], shape: torch.Size
    ) -> Tensor:
        ctx.sums, ctx.place, ctx.shape = sums, place, shape
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        (gradient,) = gradients
        if not ctx.sums and not ctx.place:
            ctx.sums.append(gradient)
        else:
            total = ctx.sums.pop().float() if ctx.sums else gradient.new_zeros(ctx.shape, dtype=torch.float32)
            total[ctx.place].add_(gradient)
            ctx.sums.append(total)
        return None, None, None, None, None
