"""Target log-probabilities from logits in their own dtype, as Triton kernels: no float32 copy of the logits.

One kernel reads the logits once for the norms of rows, another one writes their gradient in their place. The targets
of a row, of which there may be several or none, are gathered and scattered by torch: they are one number in 151,936.

liger-kernel 0.8.0's `liger_cross_entropy_kernel` does not fit: it takes one target for a row, and writes the gradient
of a mean or a sum before the upstream gradient is known. With `reduction="none"` it keeps the losses in the dtype of
the logits, which in bfloat16 are wrong by up to 0.2 %, and its backward makes a second tensor of the logits' size; and
it waits for the device four times. Imports triton, which torch's wheels for a CPU lack. Knows logits.
"""

# Triton compiles the functions below: of annotations it takes those of constants alone
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportInvalidTypeForm=false

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

triton: Any = importlib.import_module("triton")  # it has no types
tl: Any = importlib.import_module("triton.language")

_BLOCK = 8192
"""Logits of a row that a program holds at once: 16 KiB in bfloat16."""
_WARPS = 16


class LogSoftmaxAt(Function):
    """log softmax(logits)[owners, ids], float32 [pairs]. Backward makes the logits' gradient in their place.

    logits: float32 or bfloat16 [rows, vocabulary], contiguous, which nothing else reads; owners, ids: int64 [pairs], no
    pair twice. All sums are float32. With p = softmax(logits), the outputs' gradient g and s the sum of g over row i's
    pairs, the logits' gradient is -p_ij s, and g - p_ij s at the pairs: rounded once to the logits' dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, owners: Tensor, ids: Tensor) -> Tensor:
        largest, sums = norms_of(logits)
        of_pairs = logits[owners, ids].float()
        ctx.save_for_backward(logits, largest, sums, of_pairs, owners, ids)
        return of_pairs - (sums.log() + largest)[owners]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        logits, largest, sums, of_pairs, owners, ids = ctx.saved_tensors
        factors = torch.zeros_like(sums).index_add_(0, owners, gradient).div_(sums).neg_()
        of_targets = (of_pairs - largest[owners]).exp_().mul_(factors[owners]).add_(gradient)
        result = into_gradient(logits, largest, factors)
        result.view(-1).index_copy_(0, owners * logits.shape[1] + ids, of_targets.to(logits.dtype))
        return result, None, None


def norms_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, or 0 if all are -inf, and the sum of exp(logit - largest): float32 [rows] each.
    logits: float32 or bfloat16 [rows, vocabulary], contiguous."""
    largest, sums = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _norms[(len(logits),)](logits, largest, sums, logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS)
    return largest, sums


def into_gradient(logits: Tensor, largest: Tensor, factors: Tensor) -> Tensor:
    """exp(logit - largest) factor in the place of the logits, in their dtype. logits: as for `norms_of`; largest,
    factors: float32 [rows]."""
    if len(logits):
        _into_gradient[(len(logits),)](logits, largest, factors, logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS)
    return logits


@triton.jit
def _norms(logits, largest, sums, columns, BLOCK: tl.constexpr):
    """One program for a row. The sum is that of exp(logit - largest so far) ("Online normalizer calculation for
    softmax", arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)  # rows * columns may be above 2^31
    logits += row * columns
    before = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        block = tl.load(logits + places, mask=places < columns, other=float("-inf")).to(tl.float32)
        new = tl.maximum(before, tl.max(block, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)  # else -inf - -inf where all logits so far are -inf
        total = total * tl.exp(before - finite) + tl.sum(tl.exp(block - finite), 0)
        before = new
    tl.store(largest + row, tl.where(before == float("-inf"), 0.0, before))
    tl.store(sums + row, total)


@triton.jit
def _into_gradient(logits, largest, factors, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    shift = tl.load(largest + row)
    factor = tl.load(factors + row)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        block = tl.load(logits + places, mask=places < columns, other=float("-inf")).to(tl.float32)
        tl.store(logits + places, (tl.exp(block - shift) * factor).to(logits.dtype.element_ty), mask=places < columns)
