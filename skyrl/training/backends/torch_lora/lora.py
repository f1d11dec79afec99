"""Linear layers that serve many adapters at once: each segment of rows gets the low-rank update of its adapter.

Knows how a wrapped layer computes. Knows nothing of which layers are wrapped, of losses or the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from skyrl.training.backends.torch_lora.adapter import LoraPair, Target
from skyrl.training.backends.torch_lora.adapter_stack import AdapterStack
from skyrl.training.backends.torch_lora.lora_product import (
    Activation,
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
