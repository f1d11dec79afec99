"""Target log-probabilities from logits in their own dtype, as Triton kernels: no float32 copy of the logits.

One kernel reads the logits once for the norm of each row, another one writes their gradient in their place. The targets
of a row, of which there may be several or none, are gathered and scattered by torch: they are one number in 151,936.

liger-kernel 0.8.0's `liger_cross_entropy_kernel` does not fit: it takes one target for a row, and writes the gradient
of a mean or a sum before the upstream gradient is known. With `reduction="none"` it keeps the losses in the dtype of
the logits, which in bfloat16 are wrong by up to 0.4 %, and its backward makes a second tensor of the logits' size; and
it waits for the device four times. Imports triton, which torch's wheels for a CPU lack. Knows logits.
"""

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
        norms = logsumexp(logits)
        logprobs = logits[owners, ids].float() - norms[owners]
        ctx.save_for_backward(logits, norms, logprobs, owners, ids)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        logits, norms, logprobs, owners, ids = ctx.saved_tensors
        of_row = torch.zeros_like(norms).index_add_(0, owners, gradient)
        of_pairs = gradient - logprobs.exp() * of_row[owners]
        result = into_gradient(logits, norms, of_row)
        result.view(-1).index_copy_(0, owners * logits.shape[1] + ids, of_pairs.to(logits.dtype))
        return result, None, None


def logsumexp(logits: Tensor) -> Tensor:
    """log sum exp of each row: float32 [rows]. logits: float32 or bfloat16 [rows, vocabulary], contiguous."""
    norms = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _logsumexp[(len(logits),)](logits, norms, logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS)
    return norms


def into_gradient(logits: Tensor, norms: Tensor, of_row: Tensor) -> Tensor:
    """-exp(logits - norms) of_row in the place of the logits, in their dtype. logits: as for `logsumexp`; norms,
    of_row: float32 [rows]."""
    if len(logits):
        _into_gradient[(len(logits),)](logits, norms, of_row, logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS)
    return logits


@triton.jit
def _logsumexp(
    logits: Any,
    norms: Any,
    columns: Any,
    BLOCK: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
) -> None:
    """One program for a row. The sum is that of exp(logit - largest so far) ("Online normalizer calculation for
    softmax", arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)  # rows * columns may be above 2^31
    logits += row * columns
    largest = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        block = tl.load(logits + places, mask=places < columns, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(block, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)  # else -inf - -inf where all logits so far are -inf
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(block - finite), 0)
        largest = new
    tl.store(norms + row, largest + tl.log(tl.where(total == 0.0, 1.0, total)))  # 0: all are -inf


@triton.jit
def _into_gradient(
    logits: Any,
    norms: Any,
    of_row: Any,
    columns: Any,
    BLOCK: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    norm = tl.load(norms + row)
    factor = -tl.load(of_row + row)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        block = tl.load(logits + places, mask=places < columns, other=float("-inf")).to(tl.float32)
        tl.store(logits + places, (tl.exp(block - norm) * factor).to(logits.dtype.element_ty), mask=places < columns)
