"""Layers without attention, as pieces for graphs: norms, rotation, products with an adapter, and a gated MLP, forward
and backward, with the functions of `kernels.between`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skyrl.trainer.graphs.pieces import GraphedRows, Graphs, Piece, Results
from skyrl.trainer.kernels import between

EPS = 1e-6


def forward(numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """hidden [R, hidden] to the next layer's, and what the backward needs. numbers: the adapter's scale."""
    weight, product, both, down, lora_a, lora_b = fixed
    hidden, cos, sin = of_rows
    rows, rstd = between.rms_norm(hidden, weight, EPS)
    low_rank = torch.mm(rows, lora_a.t()).mul_(numbers)
    states = torch.mm(rows, product.t()).addmm_(low_rank, lora_b.t())
    turned, _ = between.rotated(states.unflatten(1, (-1, cos.shape[1])), None, EPS, cos, sin)
    total, rows, rstd_of_total = between.add_rms_norm(turned.flatten(1), hidden, weight, EPS)
    gate, up = (torch.mm(rows, each.t()) for each in both.chunk(2))
    result = torch.mm(between.swiglu(gate, up), down.t()).add_(total)
    return Results((result, hidden, rstd, low_rank, total, rstd_of_total, gate, up))


def backward(numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """The gradients of hidden and of both matrices, from that of the result."""
    weight, product, both, down, lora_a, lora_b = fixed
    gradient, hidden, rstd, low_rank, total, rstd_of_total, gate, up, cos, sin = of_rows
    of_gate, of_up, *_ = between.swiglu_backward(torch.mm(gradient, down), gate.clone(), up.clone())
    of_both = torch.cat((of_gate, of_up), dim=1)
    of_total = between.rms_norm_backward(torch.mm(of_both, both), total, weight, rstd_of_total, gradient)
    of_heads = of_total.unflatten(1, (-1, cos.shape[1]))
    of_states = between.rotated_backward(of_heads, of_heads, None, None, cos, sin).flatten(1)
    rows, _ = between.rms_norm(hidden, weight, EPS)
    of_low_rank = torch.mm(of_states, lora_b).mul_(numbers)
    of_rows_ = torch.mm(of_states, product).addmm_(of_low_rank, lora_a)
    of_hidden = between.rms_norm_backward(of_rows_, hidden, weight, rstd, of_total)
    return Results((of_hidden,), (torch.mm(of_low_rank.t(), rows), torch.mm(of_states.t(), low_rank)))


def plainly(piece: Piece, numbers: Hashable, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """A piece without a graph."""
    return piece.compute(numbers, fixed, of_rows)


@dataclass
class Layers:
    """Layers, and adapters on all of them, whose matrices are views of one buffer."""

    dtype: torch.dtype = torch.float32
    hidden: int = 24
    inner: int = 40
    size: int = 8
    count: int = 2
    device: str = "cpu"
    forward: list[Piece] = field(init=False)
    backward: list[Piece] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        shapes = (self.hidden, self.hidden), (2 * self.inner, self.hidden), (self.hidden, self.inner)
        self.frozen = [
            [
                1 + self._drawn(self.hidden) / 10,
                *(self._drawn(outs, ins) / ins**0.5 for outs, ins in shapes),
            ]
            for _ in range(self.count)
        ]
        self.forward = [Piece(("forward", layer), forward) for layer in range(self.count)]
        self.backward = [Piece(("backward", layer), backward, "backward") for layer in range(self.count)]

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def adapter(self, seed: int, rank: int = 4) -> list[Tensor]:
        torch.manual_seed(seed)
        flat = self._drawn(2 * self.count * rank * self.hidden) / self.hidden**0.5
        shapes = [(rank, self.hidden), (self.hidden, rank)] * self.count
        return [part.view(shape) for part, shape in zip(flat.chunk(len(shapes)), shapes, strict=True)]

    def batch(self, rows: int, seed: int) -> list[Tensor]:
        """hidden, cos, sin, and the gradient of the result."""
        torch.manual_seed(seed)
        angles = self._drawn(rows, self.size // 2).repeat(1, 2)
        return [self._drawn(rows, self.hidden), angles.cos(), angles.sin(), self._drawn(rows, self.hidden)]

    def forwards(self, run: Any, leaves: Sequence[Tensor], batch: Sequence[Tensor], scale: float = 0.5) -> Any:
        """The result, and what each layer keeps."""
        hidden, cos, sin = batch[:3]
        kept = []
        for layer, piece in enumerate(self.forward):
            fixed = [*self.frozen[layer], *leaves[2 * layer : 2 * layer + 2]]
            hidden, *own = run(piece, scale, fixed, (hidden, cos, sin)).of_rows
            kept.append((fixed, own))
        return hidden, kept

    def backwards(self, run: Any, kept: Sequence[Any], batch: Sequence[Tensor], scale: float = 0.5) -> list[Tensor]:
        """The gradients of hidden and of all matrices."""
        _, cos, sin, gradient = batch
        of_matrices: list[Tensor] = []
        for (fixed, own), piece in zip(reversed(kept), reversed(self.backward), strict=True):
            found = run(piece, scale, fixed, (gradient, *own, cos, sin))
            (gradient,) = found.of_rows
            of_matrices += found.whole
        return [gradient, *of_matrices]

    def whole(self, run: Any, leaves: Sequence[Tensor], batch: Sequence[Tensor], scale: float = 0.5) -> list[Tensor]:
        """The result, and all gradients."""
        result, kept = self.forwards(run, leaves, batch, scale)
        return [result, *self.backwards(run, kept, batch, scale)]

    def graphed(self, graphs: Graphs, leaves: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
        """As `whole`, with graphs. The next call overwrites the results."""
        hidden, *shared, gradient = batch
        micro_batch = graphs.micro_batch(len(hidden), leaves, of_rows=shared)
        assert isinstance(micro_batch, GraphedRows)
        return self.whole(micro_batch.run, micro_batch.leaves, [hidden, *micro_batch.of_rows, gradient])
