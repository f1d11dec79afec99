"""Linear layers that serve many adapters at once: each segment of rows gets the low-rank update of its adapter.

Knows how the base model's linear layers are found and wrapped. Knows nothing of losses or the sum of gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from skyrl.backends.torch_lora.adapter import LoraPair, Target
from skyrl.backends.torch_lora.lora_product import RowsUpdate, linear_with_updates
from skyrl.types.lora import LoraSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class LoraSegment:
    """Rows [start, stop) of a micro-batch. `pairs`: their adapter's matrices, by layer; `scale`: alpha / rank."""

    start: int
    stop: int
    scale: float
    pairs: Mapping[str, LoraPair] = field(default_factory=dict)

    def update(self, name: str) -> RowsUpdate:
        """The adapter's update of one layer on the segment's rows."""
        return RowsUpdate(self.start, self.stop, self.scale, *self.pairs[name])


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

    def for_segment(self, rows: Tensor, segment: LoraSegment) -> Tensor:
        """The layer on some rows of one segment, whichever segments are active. rows: [n, in_features]."""
        if self.name not in segment.pairs:
            return self.base(rows)
        update = segment.update(self.name)._replace(start=0, stop=len(rows))
        return linear_with_updates(rows, self.base.weight, self.base.bias, [update])


def wrap_linears(model: nn.Module, active: ActiveSegments) -> dict[str, MultiLoraLinear]:
    """Replace every linear layer that adapters can train by a MultiLoraLinear. Returns the new layers in module order.

    Raises ValueError unless each decoder layer has each attention and MLP projection once, and the model has one
    lm_head: otherwise fused projections and mixtures of experts would silently stay untrained.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in ATTENTION + MLP + UNEMBED:
            found[name] = module
    _check_complete(list(found))
    wrapped: dict[str, MultiLoraLinear] = {}
    for name, linear in found.items():
        parent, _, leaf = name.rpartition(".")
        wrapped[name] = MultiLoraLinear(name, linear, active)
        setattr(model.get_submodule(parent), leaf, wrapped[name])
    return wrapped


def _check_complete(names: Sequence[str]) -> None:
    known = ", ".join(ATTENTION + MLP + UNEMBED)
    layers: dict[str, list[str]] = {}
    heads: list[str] = []
    for name in names:
        leaf = name.rsplit(".", 1)[-1]
        match = _LAYER.search(name)
        if match is not None:
            layers.setdefault(match.group(1), []).append(leaf)
        elif leaf in UNEMBED:
            heads.append(name)
    if not layers:
        raise ValueError(f"no linear layers of a known name found; LoRA can train: {known}")
    if len(heads) != 1:
        raise ValueError(f"needs one lm_head, found {len(heads)}")
    for number, leaves in layers.items():
        for leaf in ATTENTION + MLP:
            if leaves.count(leaf) != 1:
                raise ValueError(
                    f"layer {number} has {leaves.count(leaf)} linear layers named {leaf}, needs 1: fused "
                    f"projections and mixtures of experts cannot be trained; every layer must have {known}"
                )


def trained_targets(targets: Iterable[Target], spec: LoraSpec) -> list[Target]:
    """The targets that the spec's train flags select, in the order given."""
    leaves = ATTENTION * spec.train_attn + MLP * spec.train_mlp + UNEMBED * spec.train_unembed
    return [target for target in targets if target.name.rsplit(".", 1)[-1] in leaves]
