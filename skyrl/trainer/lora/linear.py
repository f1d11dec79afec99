"""Linear layers that serve many adapters at once: each segment of rows gets the low-rank update of its adapter.

A gated MLP, down_proj(activation(gate_proj(x)) * up_proj(x)), keeps four tensors of the MLP's width for its backward:
both projections, the activated gate, and the product. The last two are cheap to compute again, so they are not kept.
Knows how a wrapped layer computes, and transformers' names of the MLP's projections. Knows nothing of which layers are
wrapped, of losses or the sum of gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.trainer.lora.adapter import LoraPair, Target
from skyrl.trainer.lora.products import (
    Activation,
    AdapterStack,
    RowsUpdate,
    StackedUpdate,
    Update,
    gated_linear_with_updates,
    linear_with_updates,
)


@dataclass(frozen=True)
class LoraSegment:
    """Rows [start, stop) of a micro-batch. `pairs`: their adapter's matrices, by layer; `scale`: alpha / rank.

    With a `stack`, the rows belong to several adapters, and `ends` says to which, as in `StackedUpdate`. Then the pairs
    are the stack's leaves; the scales are multiplied into them."""

    start: int
    stop: int
    scale: float
    pairs: Mapping[str, LoraPair] = field(default_factory=dict)
    ends: Tensor | None = None
    stack: AdapterStack | None = None

    def update(self, name: str) -> Update:
        """The update of one layer on the segment's rows."""
        if self.ends is None:
            return RowsUpdate(self.start, self.stop, self.scale, *self.pairs[name])
        return StackedUpdate(self.start, self.stop, *self.pairs[name], self.ends)


class ActiveSegments:
    """The segments of the running micro-batch, shared by all wrapped layers of one base model."""

    def __init__(self) -> None:
        self.segments: Sequence[LoraSegment] = ()

    @contextmanager
    def use(self, segments: Sequence[LoraSegment]) -> Iterator[None]:
        """Apply `segments` to every wrapped layer. Backward belongs inside, because it may recompute the forward."""
        before, self.segments = self.segments, segments
        try:
            yield
        finally:
            self.segments = before


class MultiLoraLinear(nn.Module):
    """A frozen linear layer, plus each active segment's low-rank update on the segment's rows.

    Input [1, rows, in_features], or any shape when no segment is active. The segments cover all rows, in order.
    """

    def __init__(self, name: str, base: nn.Linear, active: ActiveSegments) -> None:
        super().__init__()
        self.name = name
        self.base = base
        self.active = active

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def target(self) -> Target:
        return Target(self.name, self.base.in_features, self.base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        updates = [segment.update(self.name) for segment in self.active.segments if self.name in segment.pairs]
        return linear_with_updates(x, self.base.weight, self.base.bias, updates) if updates else self.base(x)

    def of_gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """The layer on activation(gate) * up. With active segments that input is not kept for the backward."""
        updates = [segment.update(self.name) for segment in self.active.segments if self.name in segment.pairs]
        if not updates:
            return self.base(activation(gate) * up)
        return gated_linear_with_updates(gate, up, activation, self.base.weight, self.base.bias, updates)

    def for_segment(self, rows: Tensor, segment: LoraSegment) -> Tensor:
        """The layer on some rows of one segment, whichever segments are active. rows: [n, in_features]. The segment's
        `ends` are where each adapter's rows end among these; an adapter may have none of them."""
        if self.name not in segment.pairs:
            return self.base(rows)
        update = segment.update(self.name)._replace(start=0, stop=len(rows))
        if isinstance(update, StackedUpdate):
            update = update._replace(may_lack_rows=True)
        return linear_with_updates(rows, self.base.weight, self.base.bias, [update])


PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def keep_less(model: nn.Module) -> int:
    """Let the model's plain gated MLPs, with layers that adapters train, compute their product again. Returns how many
    do. MLPs of other formulas stay as they are."""
    plain: dict[type, bool] = {}
    found = 0
    for module in model.modules():
        kind: Any = type(module)
        if not isinstance(getattr(module, "down_proj", None), MultiLoraLinear):
            continue
        if kind not in plain:
            plain[kind] = all(hasattr(module, part) for part in PARTS) and _is_plain(kind, module.act_fn)
        if plain[kind]:
            module.forward = functools.partial(_gated, module)
            found += 1
    return found


def _gated(module: Any, x: Tensor) -> Tensor:
    """x [..., hidden]; the result has its shape."""
    return module.down_proj.of_gated(module.gate_proj(x), module.up_proj(x), module.act_fn)


def _is_plain(kind: Any, activation: Any) -> bool:
    """Whether modules of this class compute what `_gated` does, tried with simple functions as their layers."""
    tried = SimpleNamespace(
        gate_proj=lambda x: 2 * x, up_proj=lambda x: x + 1, down_proj=lambda x: x - 3, act_fn=activation
    )
    x = torch.linspace(-2, 2, 9)
    try:
        return torch.equal(kind.forward(tried, x), activation(2 * x) * (x + 1) - 3)
    except Exception:  # it needs more than these four: its formula is another one
        return False
