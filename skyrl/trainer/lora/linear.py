"""Linear layers that serve many adapters at once: each segment of rows gets the low-rank update of its adapter.

A frozen layer and its updates are one operation of autograd. The base model's product is one product over all rows.
Each update is added to its slice of the result in place: no row is copied, and no zeros are computed for rows without
an adapter. Only the input and the low-rank rows are kept for the backward. Each gradient comes from the rows of its own
adapter alone, so numbers that are not finite stay with their tenant.

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
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from skyrl.trainer.lora.adapter import Adapter, LoraPair, Target
from skyrl.trainer.lora.stack import AdapterStack

Activation = Callable[[Tensor], Tensor]


class RowsUpdate(NamedTuple):
    """scale * (x A^T) B^T for rows [start, stop). lora_a [rank, in_features], lora_b [out_features, rank]."""

    start: int
    stop: int
    scale: float
    lora_a: Tensor
    lora_b: Tensor


class StackedUpdate(NamedTuple):
    """The updates (x A^T) B^T of several adapters, whose rows lie one after the other in [start, stop). lora_a
    [adapters, rank, in_features], lora_b [adapters, out_features, rank], with the scales in it. ends: int32 [adapters],
    where the rows of each end, counted from `start`. `may_lack_rows`: an adapter may have none of the rows."""

    start: int
    stop: int
    lora_a: Tensor
    lora_b: Tensor
    ends: Tensor
    may_lack_rows: bool = False


Update = RowsUpdate | StackedUpdate


def groups_adapters(device: torch.device) -> bool:
    """Whether adapters are updated together. On a CPU one product for each adapter is as quick, and needs no sum."""
    return device.type == "cuda"


def linear_with_updates(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]) -> Tensor:
    """x W^T + bias, plus the updates. x: [..., in_features], whose flattened rows the updates name; returns
    [..., out_features] in x's dtype. Gradients go to x and to the adapters' matrices, never to weight or bias."""
    # autograd sees no tensors inside a list
    matrices = [matrix for update in updates for matrix in (update.lora_a, update.lora_b)]
    return _Product.apply(x, weight, bias, updates, *matrices)


def gated_linear_with_updates(
    gate: Tensor, up: Tensor, activation: Activation, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]
) -> Tensor:
    """`linear_with_updates` of activation(gate) * up, with the same bits. Only gate and up are kept for the backward,
    which computes the input again: two of an MLP's four wide tensors, 39 % of what a layer of Qwen2.5-0.5B keeps."""
    matrices = [matrix for update in updates for matrix in (update.lora_a, update.lora_b)]
    return _GatedProduct.apply(gate, up, activation, weight, bias, updates, *matrices)


def of_used_experts(gradient: Tensor, ends: Tensor) -> Tensor:
    """The gradient [experts, outputs, inputs], with zeros for experts without rows, whatever is there."""
    is_used = ends.diff(prepend=ends.new_zeros(1)) > 0
    return torch.where(is_used[:, None, None], gradient, 0)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[Update], *matrices: Tensor
    ) -> Tensor:
        output, kept = _computed(x, weight, bias, updates)
        ctx.save_for_backward(x, weight, *kept)
        ctx.updates = [update._replace(lora_a=None, lora_b=None) for update in updates]
        return output  # no view: OLMo clamps it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved_tensors
        of_x, of_matrices = _gradients(grads[0], x, weight, ctx.updates, kept, of_input=ctx.needs_input_grad[0])
        return of_x, None, None, None, *of_matrices


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        weight: Tensor,
        bias: Tensor | None,
        updates: Sequence[Update],
        *matrices: Tensor,
    ) -> Tensor:
        output, kept = _computed(activation(gate) * up, weight, bias, updates)
        ctx.save_for_backward(gate, up, weight, *kept)
        ctx.activation = activation
        ctx.updates = [update._replace(lora_a=None, lora_b=None) for update in updates]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up, weight, *kept = ctx.saved_tensors
        of_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            activated = ctx.activation(leaf)
        x = activated.detach() * up
        of_x, of_matrices = _gradients(grads[0], x, weight, ctx.updates, kept, of_input=of_input)
        if of_x is None:
            return None, None, None, None, None, None, *of_matrices
        (of_gate,) = torch.autograd.grad(activated, leaf, of_x * up)
        return of_gate, of_x.mul_(activated.detach()), None, None, None, None, *of_matrices


def _computed(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[Update]) -> tuple[Tensor, list[Tensor]]:
    """x W^T + bias plus the updates, and what the backward needs of them: three tensors of each update."""
    output = torch.nn.functional.linear(x, weight, bias)
    rows, of_rows = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    kept: list[Tensor] = []
    for update in updates:
        lora_a, lora_b = update.lora_a.to(x.dtype), update.lora_b.to(x.dtype)
        own, of_own = _rows(rows, update), _rows(of_rows, update)
        if isinstance(update, StackedUpdate):
            low_rank = grouped_mm(own, lora_a.transpose(1, 2), offs=update.ends)
            of_own.add_(grouped_mm(low_rank, lora_b.transpose(1, 2), offs=update.ends))
        else:
            low_rank = torch.mm(own, lora_a.t()).mul_(update.scale)
            of_own.addmm_(low_rank, lora_b.t())
        kept += [lora_a, lora_b, low_rank]
    return output, kept


def _gradients(
    of_output: Tensor, x: Tensor, weight: Tensor, updates: Sequence[Update], kept: Sequence[Tensor], *, of_input: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of x (None without `of_input`) and of each update's two matrices. `kept`: of `_computed`."""
    grad = of_output.reshape(-1, weight.shape[0])
    rows = x.reshape(-1, weight.shape[1])
    of_rows = torch.mm(grad, weight) if of_input else None
    of_matrices: list[Tensor] = []
    each = iter(kept)
    for update in updates:
        lora_a, lora_b, low_rank = next(each), next(each), next(each)
        own, of_own = _rows(rows, update), _rows(grad, update)
        if isinstance(update, StackedUpdate):
            ends, of_own = update.ends, of_own.contiguous()
            of_low_rank = grouped_mm(of_own, lora_b, offs=ends)
            pair = [grouped_mm(of_low_rank.t(), own, offs=ends), grouped_mm(of_own.t(), low_rank, offs=ends)]
            of_matrices += [of_used_experts(matrix, ends) for matrix in pair] if update.may_lack_rows else pair
            if of_rows is not None:
                _rows(of_rows, update).add_(grouped_mm(of_low_rank, lora_a, offs=ends))
        else:
            of_low_rank = torch.mm(of_own, lora_b).mul_(update.scale)
            of_matrices.append(torch.mm(of_low_rank.t(), own))
            of_matrices.append(torch.mm(of_own.t(), low_rank))
            if of_rows is not None:
                _rows(of_rows, update).addmm_(of_low_rank, lora_a)
    return None if of_rows is None else of_rows.view(x.shape), of_matrices


def _rows(tensor: Tensor, update: Update) -> Tensor:
    """The update's rows. Without a view for all rows: a view costs as much as a small product."""
    start, stop = update.start, update.stop
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]


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

    def update(self, name: str) -> Update:
        """The update of one layer on the segment's rows."""
        if self.ends is None:
            return RowsUpdate(self.start, self.stop, self.scale_of(name), *self.pairs[name])
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
