"""Calls of every function of `kernels.between` with exact results, for implementations of them on any device.

Exact: the formulas in float64, of which autograd makes the gradients. Inputs are rounded to the dtype before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skyrl.trainer.kernels.between import IN_TORCH, Between

EPS = 1e-6
HEADS = 3


class Case(NamedTuple):
    """A call of `function`, and its exact results, float64 (None for none)."""

    function: str
    arguments: tuple[Any, ...]
    exact: tuple[Tensor | None, ...]

    def results(self, of: Between) -> tuple[Tensor | None, ...]:
        """Those of one implementation. The arguments stay as they are."""
        found = getattr(of, self.function)(*self.again())
        return found if isinstance(found, tuple) else (found,)

    def again(self) -> tuple[Any, ...]:
        """Copies of the arguments with their strides: functions may write into them."""
        return tuple(map(_again, self.arguments))

    def check(self, of: Between) -> None:
        """Relative errors are at most 1.5 times those of plain torch; 1e-6 more, which is what float32 may have."""
        for found, plain, exact in zip(self.results(of), self.results(IN_TORCH), self.exact, strict=True):
            if exact is None:
                assert found is None
                continue
            assert found is not None
            assert plain is not None
            assert (found.dtype, found.shape) == (plain.dtype, plain.shape), self.function
            assert _error(found, exact) <= 1.5 * _error(plain, exact) + 1e-6, self.function


def cases(rows: int, n: int, dtype: torch.dtype, *, apart: bool, device: str = "cpu") -> Iterator[Case]:
    """Every function once, and rotations with and without a norm. apart: tensors are columns of wider ones."""
    torch.manual_seed(n)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        values = (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).to(device)
        return torch.cat([values, values], dim=-1)[..., : shape[-1]] if apart else values

    def heads() -> Tensor:
        return random(rows, HEADS * n).unflatten(1, (HEADS, n))

    x, residual, gradient, weight = random(rows, n, scale=3), random(rows, n), random(rows, n), random(n).contiguous()
    rstd = _rstd(x.double()).float()[:, 0]
    yield Case("rms_norm", (x, weight, EPS), (_norm(x.double(), weight.double()), _rstd(x.double())[:, 0]))
    total = x.double() + residual.double()
    exact = total, _norm(total, weight.double()), _rstd(total)[:, 0]
    yield Case("add_rms_norm", (x, residual, weight, EPS), exact)
    yield Case("normed", (x, weight, rstd, EPS), (_norm(x.double(), weight.double()),))
    (of_x,) = _gradients(lambda x: _norm(x, weight.double()), gradient, x)
    yield Case("rms_norm_backward", (gradient, x, weight, rstd, residual), (of_x + residual.double(),))

    angles = torch.rand(rows, n // 2, dtype=torch.float64) * 6.3
    cos, sin = (torch.cat([half, half], dim=-1).to(dtype).to(device) for half in (angles.cos(), angles.sin()))
    x, gradient = heads(), heads()
    for scales in (weight, None):
        rotated = _rotation(scales, cos, sin)
        rstds = None if scales is None else _rstd(x.double())[..., 0]
        yield Case("rotated", (x, scales, EPS, cos, sin), (rotated(x.double()), rstds))
        kept = None if rstds is None else rstds.float()
        yield Case("rotated_backward", (gradient, x, scales, kept, cos, sin), _gradients(rotated, gradient, x))

    gate, up, gradient = random(rows, n, scale=4), random(rows, n), random(rows, n)
    gate[:1, :2] = torch.tensor([-200.0, 200.0])  # where exp(200) is infinite in float32
    yield Case("swiglu", (gate, up), (_swiglu(gate.double(), up.double()),))
    of_both = _gradients(_swiglu, gradient, gate, up)
    yield Case("swiglu_backward", (gradient, gate, up), (*of_both, _swiglu(gate.double(), up.double())))
    if rows:
        yield from _grouped_cases(rows, n, random)


def _grouped_cases(rows: int, n: int, random: Callable[..., Tensor]) -> Iterator[Case]:
    """Groups without rows, of one row, and of the rest; matrices as rows and as columns, of ranks that are no powers of
    two."""
    ends = [0, min(rows, 1), min(rows, 1), rows // 2, rows, rows]
    for k, columns in ((24, False), (8, True), (136, False)):
        out, x, matrices = random(rows, n), random(rows, k), random(len(ends), k, n).contiguous()
        exact = out.double()
        for matrix, (start, stop) in zip(matrices.double(), pairwise([0, *ends]), strict=True):
            exact[start:stop] += x[start:stop].double() @ matrix
        if columns:
            matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
        places = torch.tensor(ends, dtype=torch.int32, device=out.device)
        yield Case("add_grouped", (out, x, matrices, places), (exact,))


def _rstd(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * _rstd(x) * weight


def _rotation(weight: Tensor | None, cos: Tensor, sin: Tensor) -> Callable[[Tensor], Tensor]:
    def rotated(x: Tensor) -> Tensor:
        if weight is not None:
            x = _norm(x, weight.double())
        left, right = x.chunk(2, dim=-1)
        return x * cos.double()[:, None] + torch.cat([-right, left], dim=-1) * sin.double()[:, None]

    return rotated


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _gradients(formula: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.double().requires_grad_() for each in inputs]
    return torch.autograd.grad(formula(*leaves), leaves, gradient.double())


def _again(argument: Any) -> Any:
    """A copy with the strides of the argument, which `clone` gives only to tensors without gaps."""
    if not isinstance(argument, Tensor):
        return argument
    elements = 1 + sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    elements = elements if argument.numel() else 0
    copy = argument.new_zeros(elements).as_strided(argument.shape, argument.stride())
    return copy.copy_(argument)


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
