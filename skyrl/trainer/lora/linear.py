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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, pad

from skyrl.trainer.lora.adapter import Adapter, LoraPair, Target

Activation = Callable[[Tensor], Tensor]

GROUPED_RANKS = 8
"""`grouped_mm` takes rows that begin at multiples of 16 bytes: in bfloat16, ranks that are multiples of this."""


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


def grouped_rank(rank: int) -> int:
    """The smallest rank that grouped products take and that is not below `rank`."""
    return -(-rank // GROUPED_RANKS) * GROUPED_RANKS


@dataclass(frozen=True)
class AdapterStack:
    """Adapters that train no experts. The leaves need the memory of as many adapters that all have the highest rank and
    every layer of the stack. Their gradients need as much again, and `gradients` copies these once."""

    adapters: Sequence[Adapter]

    @functools.cached_property
    def rank(self) -> int:
        """The rank of every matrix in the stack."""
        return grouped_rank(max(adapter.spec.rank for adapter in self.adapters))

    @functools.cached_property
    def targets(self) -> tuple[Target, ...]:
        """The layers that any of the adapters trains. The adapter with the most layers gives the order: an adapter with
        all layers then lies in the stack as in its own buffer."""
        ordered = sorted(self.adapters, key=lambda adapter: len(adapter.targets), reverse=True)
        return tuple({target.name: target for adapter in ordered for target in adapter.targets}.values())

    @property
    def row_numel(self) -> int:
        """Elements of one row of the stack, which holds one adapter."""
        return self.rank * sum(_sizes(self.targets))

    def leaves(self, requires_grad: bool, dtype: torch.dtype) -> dict[str, LoraPair]:
        """New autograd leaves, by target name: lora_A [adapters, rank, in_features], and scale * lora_B [adapters,
        out_features, rank], rounded once to `dtype`."""
        flat = torch.empty(len(self.adapters), self.row_numel, dtype=dtype, device=self.adapters[0].device)
        for alike, factors in self._alike:
            self._write(self.adapters[alike], factors, flat[alike])
        pieces = flat.split([self.rank * size for size in _sizes(self.targets)], dim=1)
        found: dict[str, LoraPair] = {}
        for target, of_a, of_b in zip(self.targets, pieces[::2], pieces[1::2], strict=True):
            lora_a = of_a.view(-1, self.rank, target.in_features).detach().requires_grad_(requires_grad)
            lora_b = of_b.view(-1, target.out_features, self.rank).detach().requires_grad_(requires_grad)
            found[target.name] = lora_a, lora_b
        return found

    def gradients(self, of_leaves: Iterable[Tensor]) -> list[Tensor]:
        """Each adapter's gradient, flat float32 in the order of its buffers, from the gradients of the leaves. Each has
        its own memory, so that one that waits for its optimizer step does not keep the others."""
        rows = torch.cat([gradient.flatten(1) for gradient in of_leaves], dim=1)
        found: list[Tensor] = []
        for alike, factors in self._alike:
            first = self.adapters[alike][0]
            for own, of_own in zip(self._cut(first, rows[alike]), factors, strict=True):
                # a gradient of scale * lora_B becomes one of lora_B
                found.append((own.view(-1, first.spec.rank) * of_own).view(-1))
        return found

    @functools.cached_property
    def _alike(self) -> list[tuple[slice, Tensor]]:
        """Runs of consecutive adapters with the same rank and targets, and their `_factors`. A run is padded at once:
        the host's time depends on the number of ranks rather than of adapters."""
        kinds = groupby(self.adapters, lambda adapter: (adapter.spec.rank, adapter.targets))
        ends = [0, *accumulate(len([*adapters]) for _, adapters in kinds)]
        runs = [slice(*each) for each in pairwise(ends)]
        return [(run, _factors(self.adapters[run])) for run in runs]

    def _is_whole(self, adapter: Adapter) -> bool:
        """Whether the adapter needs no padding."""
        return adapter.spec.rank == self.rank and adapter.targets == self.targets

    def _write(self, adapters: Sequence[Adapter], factors: Tensor, rows: Tensor) -> None:
        """Write adapters with the same rank and targets, scaled and padded, into their rows of the stack."""
        first, count = adapters[0], len(adapters)
        rank, more = first.spec.rank, self.rank - first.spec.rank
        if self._is_whole(first):
            self._scale(adapters, factors, rows)
            return
        flat = rows.new_empty(count, first.weights.numel())
        self._scale(adapters, factors, flat)
        pieces = flat.split([rank * size for size in _sizes(first.targets)], dim=1)
        wide = pad(torch.cat(pieces[1::2], dim=1).view(count, -1, rank), (0, more)).view(count, -1)
        of_b = wide.split([self.rank * target.out_features for target in first.targets], dim=1)
        own = {target.name: pair for target, *pair in zip(first.targets, pieces[::2], of_b, strict=True)}
        widest = max(target.in_features + target.out_features for target in self.targets)
        zeros = rows.new_zeros(count, self.rank * widest)
        padded: list[Tensor] = []
        for target in self.targets:
            if target.name in own:
                lora_a, lora_b = own[target.name]
                padded += [lora_a, zeros[:, : more * target.in_features], lora_b]
            else:
                padded.append(zeros[:, : self.rank * (target.in_features + target.out_features)])
        torch.cat(padded, dim=1, out=rows)

    @staticmethod
    def _scale(adapters: Sequence[Adapter], factors: Tensor, rows: Tensor) -> None:
        """Write adapters of one rank into rows [adapters, numel], as they lie in their buffers, scaled."""
        rank = adapters[0].spec.rank
        for adapter, own, row in zip(adapters, factors, rows, strict=True):
            torch.mul(adapter.weights.detach().view(-1, rank), own, out=row.view(-1, rank))

    def _cut(self, adapter: Adapter, rows: Tensor) -> Tensor:
        """Rows of gradients without the padding: [adapters, numel]. The adapters have this one's rank and targets."""
        if self._is_whole(adapter):
            return rows
        rank, count = adapter.spec.rank, len(rows)
        pieces = rows.split([self.rank * size for size in _sizes(self.targets)], dim=1)
        pairs = {target.name: pair for target, *pair in zip(self.targets, pieces[::2], pieces[1::2], strict=True)}
        own = [pairs[target.name] for target in adapter.targets]
        wide = torch.cat([of_b for _, of_b in own], dim=1).view(count, -1, self.rank)
        narrow = wide[:, :, :rank].reshape(count, -1)
        of_b = narrow.split([rank * target.out_features for target in adapter.targets], dim=1)
        of_a = [pair[0][:, : rank * target.in_features] for pair, target in zip(own, adapter.targets, strict=True)]
        return torch.cat([*chain(*zip(of_a, of_b, strict=True))], dim=1)


def _sizes(targets: Sequence[Target]) -> tuple[int, ...]:
    """For each matrix in an adapter's buffer, in order, the number of its elements divided by the rank."""
    return tuple(size for target in targets for size in (target.in_features, target.out_features))


def _factors(adapters: Sequence[Adapter]) -> Tensor:
    """For adapters with the same rank and targets, the factor of each `rank` elements of a buffer: the adapter's scale
    for lora_B, 1 for lora_A. float32 [adapters, numel / rank, 1]. Every matrix begins at a multiple of the rank, so
    these elements never belong to two matrices."""
    is_a, is_b = _which_matrix(_sizes(adapters[0].targets), adapters[0].device)
    scales = torch.tensor([adapter.scale for adapter in adapters]).to(adapters[0].device, non_blocking=True)
    return torch.addcmul(is_a, scales[:, None], is_b)[..., None]


@functools.lru_cache(maxsize=4)
def _which_matrix(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where lora_A is and where lora_B is, each 0.0 or 1.0, [sum of sizes]. Cached, because a copy to a GPU waits for
    the GPU. The adapters of one base model have few different `sizes`."""
    is_b = (torch.arange(len(sizes)) % 2).float().repeat_interleave(torch.tensor(sizes)).to(device)
    return 1 - is_b, is_b


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
