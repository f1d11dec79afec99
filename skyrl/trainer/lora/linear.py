"""Linear layers that serve many adapters at once: each segment of rows gets the low-rank update of its adapter.

A frozen layer and its updates are one operation of autograd (`lora.products`). Only the input and the low-rank rows are
kept for the backward.

A gated MLP, down_proj(activation(gate_proj(x)) * up_proj(x)), keeps four tensors of the MLP's width for its backward:
both projections, the activated gate, and the product. The last two are cheap to compute again, so they are not kept.
Knows how a wrapped layer computes, and transformers' names of the MLP's projections. Knows nothing of which layers are
wrapped, of losses or the sum of gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from skyrl.trainer.kernels.between import AddGrouped, add_grouped
from skyrl.trainer.kernels.dense import takes_onednn
from skyrl.trainer.lora.adapter import Adapter, LoraPair, Target
from skyrl.trainer.lora.products import Frozen, Joined, RowsUpdate, StackedUpdate, Update, gradients, products
from skyrl.trainer.lora.stack import AdapterStack

Activation = Callable[[Tensor], Tensor]


def groups_adapters(device: torch.device) -> bool:
    """Whether adapters are updated together. On a CPU one product for each adapter is as quick, and needs no sum."""
    return device.type == "cuda"


def linear_with_updates(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]) -> Tensor:
    """x W^T + bias, plus the updates. x: [..., in_features], whose flattened rows the updates name; returns
    [..., out_features] in x's dtype. Gradients go to x and to the adapters' matrices, never to weight or bias."""
    joined, matrices = Joined.of([updates])
    return _Product.apply(x, Frozen(weight, bias), joined, *matrices)  # autograd sees no tensors inside a list


def gated_linear_with_updates(
    gate: Tensor, up: Tensor, activation: Activation, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]
) -> Tensor:
    """`linear_with_updates` of activation(gate) * up, with the same bits. Only gate and up are kept for the backward,
    which computes the input again: two of an MLP's four wide tensors, 39 % of what a layer of Qwen2.5-0.5B keeps."""
    joined, matrices = Joined.of([updates])
    return _GatedProduct.apply(gate, up, activation, Frozen(weight, bias), joined, *matrices)


class _Product(torch.autograd.Function):
    """A layer on x [..., in_features], with updates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Frozen, joined: Sequence[Joined], *matrices: Tensor) -> Tensor:
        (output,), kept = products(x, [layer], joined, matrices)
        ctx.save_for_backward(x, layer.weight, *kept)
        ctx.joined = joined
        return output  # no view: OLMo clamps it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved_tensors
        rows, gradient = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, weight.shape[0])
        of_input = ctx.needs_input_grad[0]
        of_x, of_matrices = gradients([gradient], rows, [Frozen(weight, None)], ctx.joined, kept, of_input=of_input)
        return None if of_x is None else of_x.view(x.shape), None, None, *of_matrices


class _GatedProduct(torch.autograd.Function):
    """A layer on activation(gate) * up, both [..., in_features], with updates."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        layer: Frozen,
        joined: Sequence[Joined],
        *matrices: Tensor,
    ) -> Tensor:
        (output,), kept = products(activation(gate) * up, [layer], joined, matrices)
        ctx.save_for_backward(gate, up, layer.weight, *kept)
        ctx.activation, ctx.joined = activation, joined
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up, weight, *kept = ctx.saved_tensors
        of_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            activated = ctx.activation(leaf)
        rows = (activated.detach() * up).reshape(-1, gate.shape[-1])
        gradient, layer = grads[0].reshape(-1, weight.shape[0]), Frozen(weight, None)
        of_x, of_matrices = gradients([gradient], rows, [layer], ctx.joined, kept, of_input=of_input)
        if of_x is None:
            return None, None, None, None, None, *of_matrices
        of_x = of_x.view(gate.shape)
        (of_gate,) = torch.autograd.grad(activated, leaf, of_x * up)
        return of_gate, of_x.mul_(activated.detach()), None, None, None, *of_matrices


@dataclass(frozen=True)
class LoraSegment:
    """Rows [start, stop) of a micro-batch. `pairs`: their adapter's matrices, by layer; `scale`: alpha / rank, but for
    layers in `own_scales`.

    With a `stack`, the rows belong to several adapters, and `ends` says to which, as in `StackedUpdate`. Then the pairs
    are the stack's leaves; the scales are multiplied into them. `value_rows`: int64 [positions], for each position of
    its sequences the row whose state has the value; None without a value head."""

    start: int
    stop: int
    scale: float
    pairs: Mapping[str, LoraPair] = field(default_factory=dict)
    ends: Tensor | None = None
    stack: AdapterStack | None = None
    own_scales: Mapping[str, float] = field(default_factory=dict)
    value_rows: Tensor | None = None

    @classmethod
    def of(
        cls,
        start: int,
        stop: int,
        adapter: Adapter,
        pairs: Mapping[str, LoraPair],
        value_rows: Tensor | None = None,
    ) -> Self:
        """The rows of one adapter. pairs: leaves of its weights."""
        return cls(start, stop, adapter.scale, pairs, own_scales=adapter.own_scales, value_rows=value_rows)

    @property
    def has_values(self) -> bool:
        return self.value_rows is not None

    def scale_of(self, name: str) -> float:
        """The scale of one layer's update."""
        return self.own_scales.get(name, self.scale)

    def update(self, name: str, add: AddGrouped = add_grouped) -> Update:
        """The update of one layer on the segment's rows. add: as in `StackedUpdate`."""
        if self.ends is None:
            return RowsUpdate(self.start, self.stop, self.scale_of(name), *self.pairs[name])
        return StackedUpdate(self.start, self.stop, *self.pairs[name], self.ends, add)


class ActiveSegments:
    """The segments of the running micro-batch, shared by all wrapped layers of one base model. `add_grouped`: as
    `StackedUpdate.add`."""

    def __init__(self) -> None:
        self.segments: Sequence[LoraSegment] = ()
        self.add_grouped: AddGrouped = add_grouped

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

    def updates(self) -> list[Update]:
        """Those of the active segments."""
        of_layer = [segment for segment in self.active.segments if self.name in segment.pairs]
        return [segment.update(self.name, self.active.add_grouped) for segment in of_layer]

    def forward(self, x: Tensor) -> Tensor:
        return self._with_updates(x, self.updates())

    def of_gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """The layer on activation(gate) * up. With active segments that input is not kept for the backward."""
        updates = self.updates()
        if not updates:
            return self._with_updates(activation(gate) * up, updates)
        return gated_linear_with_updates(gate, up, activation, self.base.weight, self.base.bias, updates)

    def for_segment(self, rows: Tensor, segment: LoraSegment) -> Tensor:
        """The layer on some rows of one segment, whichever segments are active. rows: [n, in_features]. The segment's
        `ends` are where each adapter's rows end among these; an adapter may have none of them."""
        if self.name not in segment.pairs:
            return self._with_updates(rows, [])
        update = segment.update(self.name, self.active.add_grouped)._replace(start=0, stop=len(rows))
        if isinstance(update, StackedUpdate):
            update = update._replace(may_lack_rows=True)
        return self._with_updates(rows, [update])

    def _with_updates(self, x: Tensor, updates: Sequence[Update]) -> Tensor:
        weight = self.base.weight
        if updates or (takes_onednn(x, len(weight)) and not weight.requires_grad):
            return linear_with_updates(x, weight, self.base.bias, updates)
        return self.base(x)


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
