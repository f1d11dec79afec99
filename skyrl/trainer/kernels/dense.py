"""Products of matrices, by torch's default or, where that is faster, by its oneDNN: float32 on an AMD CPU with AVX-512.

There torch's default, Intel's MKL, does not use AVX-512, and oneDNN takes less than half of its time
(`python -m benchmarks.products`). torch has oneDNN's product only under the name that torch.compile calls. A row of a
result has the same bits, however many rows there are beside it; a row alone may have others.

oneDNN compiles code for each new shape, which takes 0.2 to 0.4 ms and half a MiB (`device.SHAPES_KEPT` bounds it). So
MKL computes small products. Knows nothing of layers or adapters.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

SMALL = 2**22
"""Multiplications, of which MKL does some 50,000 in a microsecond."""
ROWS_OF_SUM = 1024
"""oneDNN adds all numbers of a sum in their order, so the error would grow with the number of rows."""


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this machine's processor is AMD's, with AVX-512, and torch has oneDNN's product."""
    try:
        of_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return (
        of_amd
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def takes_onednn(x: Tensor, outputs: int) -> bool:
    """Whether oneDNN computes products of x [..., inputs] with `outputs` columns."""
    is_large = x.numel() * outputs >= SMALL  # first, because it costs least
    return is_large and x.dtype == torch.float32 and x.device.type == "cpu" and onednn_is_faster()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias. x [..., inputs], weight [outputs, inputs], bias [outputs], of one dtype, in any strides;
    returns [..., outputs] in memory of its own. No autograd."""
    if not takes_onednn(x, len(weight)):
        return torch.nn.functional.linear(x, weight, bias)
    made = _onednn(x.reshape(-1, x.shape[-1]), weight, bias)
    return torch.ops.aten._unsafe_view(made, [*x.shape[:-1], len(weight)]) if x.ndim > 2 else made


def product_into(total: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0, keep: bool = True) -> None:
    """total [R, n] becomes scale a b, plus what it was with `keep`. a [R, m], b [m, n]."""
    if not takes_onednn(a, b.shape[1]):
        total.addmm_(a, b, beta=int(keep), alpha=scale)
    elif keep:
        total.add_(_onednn(a, b.t()), alpha=scale)
    else:
        torch.mul(_onednn(a, b.t()), scale, out=total)


def sum_over_rows(a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """scale a^T b, [m, n]. a [R, m], b [R, n]."""
    if not takes_onednn(a, b.shape[1]):
        return a.new_empty(a.shape[1], b.shape[1]).addmm_(a.t(), b, beta=0, alpha=scale)
    if turned := a.shape[1] > b.shape[1]:  # faster with the fewer columns first
        a, b = b, a
    total, *others = (
        _onednn(own.t(), other.t()) for own, other in zip(a.split(ROWS_OF_SUM), b.split(ROWS_OF_SUM), strict=True)
    )
    for other in others:
        total += other
    total *= scale
    return total.t().contiguous() if turned else total


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def install(model: nn.Module) -> None:
    """Let the model's linear layers, whose own weights are trained, compute with oneDNN where that is faster."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(_forward, module)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    return trained_linear(input, module.weight, module.bias)


def trained_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with autograd, also of weight and bias."""
    if not takes_onednn(x, len(weight)):
        return torch.nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        gradient, rows = grads[0].reshape(-1, len(weight)), x.reshape(-1, x.shape[-1])
        return (
            linear(gradient, weight.t()).view(x.shape) if of_x else None,
            sum_over_rows(gradient, rows) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )
