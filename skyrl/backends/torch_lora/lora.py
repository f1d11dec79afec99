"""Linear layers that serve many adapters at once: each segment of rows gets the low-rank update of its adapter.

Knows how a wrapped layer computes. Knows nothing of which layers are wrapped, of losses or the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from skyrl.backends.torch_lora.adapter import LoraPair, Target


@dataclass(frozen=True)
class LoraSegment:
    """Rows [start, stop) of a micro-batch. `pairs`: their adapter's matrices, by layer; `scale`: alpha / rank."""

    start: int
    stop: int
    scale: float
    pairs: Mapping[str, LoraPair] = field(default_factory=dict)

    def update(self, name: str, rows: Tensor) -> Tensor:
        """scale * (rows A^T) B^T in the rows' dtype. rows: [..., in_features]; returns [..., out_features]."""
        lora_a, lora_b = self.pairs[name]
        low = torch.nn.functional.linear(rows, lora_a.to(rows.dtype)) * self.scale
        return torch.nn.functional.linear(low, lora_b.to(rows.dtype))


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
        y = self.base(x)
        segments = self.active.segments
        if not any(self.name in segment.pairs for segment in segments):
            return y
        if len(segments) == 1:
            return y + segments[0].update(self.name, x)
        updates = [
            segment.update(self.name, x[:, segment.start : segment.stop])
            if self.name in segment.pairs
            else y.new_zeros(1, segment.stop - segment.start, y.shape[-1])
            for segment in segments
        ]
        return y + torch.cat(updates, dim=1)

    def for_segment(self, rows: Tensor, segment: LoraSegment) -> Tensor:
        """The layer on rows of one segment, whichever segments are active. rows: [n, in_features]."""
        y = self.base(rows)
        return y + segment.update(self.name, rows) if self.name in segment.pairs else y
