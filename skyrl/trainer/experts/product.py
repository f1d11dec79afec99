"""The experts of a mixture and the low-rank updates of adapters on them: grouped products over rows sorted by expert.

Each row goes to k experts, so there are rows * k entries. The base model's products are over all entries, sorted by
expert. An adapter's products are over the entries of its own rows, sorted by expert as well: one product for each used
expert. So no gradient is larger than the adapter's own, and numbers that are not finite stay with their tenant.
Knows nothing of modules or passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import grouped_mm, pad

from skyrl.trainer.lora.adapter import LoraPair
from skyrl.trainer.lora.products import of_used_experts

_ALIGNMENT = 16
"""Bytes. Rows of what `grouped_mm` multiplies must begin at multiples of it."""


class ExpertsUpdate(NamedTuple):
    """An adapter's update of the experts for rows [start, stop): scale * (x A_e^T) B_e^T for each projection, with the
    matrices of the row's expert e. Each pair: lora_A [experts, rank, inputs] and lora_B [experts, outputs, rank].
    `first`: a pair for each part of the first product. `scales`: of these, and of `down`."""

    start: int
    stop: int
    scales: Sequence[float]
    first: Sequence[LoraPair]
    down: LoraPair


DOWN = -1
"""The place of the second product's scale in `ExpertsUpdate.scales`."""


class BaseExperts(NamedTuple):
    """Of the base model: `first` [experts, outputs, hidden] and `down` [experts, hidden, size], with their biases
    [experts, outputs] and [experts, hidden] if they have some.

    `inner` makes [entries, size] of the first product: of its `parts` parts of equal width, such as gate and up."""

    first: Tensor
    down: Tensor
    inner: Callable[..., Tensor]
    parts: int
    first_bias: Tensor | None = None
    down_bias: Tensor | None = None


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """For `BaseExperts.inner` of experts whose first product has two parts, gate and up."""
    return lambda gate, up: activation(gate) * up


def experts_with_updates(
    hidden: Tensor, chosen: Tensor, weights: Tensor, experts: BaseExperts, updates: Sequence[ExpertsUpdate] = ()
) -> Tensor:
    """What the chosen experts make of each row, summed with its weights. hidden: [rows, hidden]; chosen: int64 [rows,
    k]; weights: [rows, k]. Returns [rows, hidden] in hidden's dtype. `updates` are in the order of their rows.

    On a CPU results and gradients are the same bits in each run, with any number of threads: nothing is added in the
    order in which threads come to it."""
    rows, per_row = chosen.shape
    x, sorted_experts, order = sorted_entries(hidden, chosen)
    ends = _ends(sorted_experts, len(experts.down))
    entries: _Entries | None = None
    if updates:
        entries = _entries_of_rows(order // per_row, sorted_experts, len(experts.down), rows, per_row, updates)
    output = _computed(x, sorted_experts, ends, experts, entries)
    return summed_entries(output, weights, order).to(hidden.dtype)


def sorted_entries(hidden: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entries' rows, sorted by expert [entries, hidden]; the expert of each; and which entry each one is, if they
    are counted row by row."""
    per_row = chosen.shape[1]
    sorted_experts, order = chosen.reshape(-1).sort(stable=True)
    # hidden[order // per_row] would be the same, but its backward adds the gradients of a row's entries by atomics.
    return hidden[:, None].expand(-1, per_row, -1).reshape(len(order), -1)[order], sorted_experts, order


def summed_entries(output: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """What sorted entries' experts have made of them [entries, hidden], summed for each row with its weights."""
    weighed = (output * weights.reshape(-1)[order, None])[_inverse(order)]
    return weighed.view(*weights.shape, -1).sum(dim=1)


def counted_entries(x: Tensor, counts: Tensor, experts: BaseExperts, updates: Sequence[ExpertsUpdate | None]) -> Tensor:
    """What their experts make of entries [entries, hidden] that are sorted by expert, and those of an expert by the
    part that they belong to. counts: how many there are, int64 [experts, parts]. `updates`: of each part, of which
    `start` and `stop` do not matter; None for a part without an adapter. Returns [entries, hidden]."""
    of_expert = counts.sum(dim=1)
    expert = torch.arange(len(counts), device=x.device).repeat_interleave(of_expert)
    ends = of_expert.cumsum(0).to(torch.int32)
    entries = _entries_counted(counts, updates) if any(each is not None for each in updates) else None
    return _computed(x, expert, ends, experts, entries)


def _computed(x: Tensor, expert: Tensor, ends: Tensor, experts: BaseExperts, entries: _Entries | None) -> Tensor:
    """Of entries sorted by expert: [entries, hidden]."""
    first = _with_bias(_products(x, experts.first, ends), experts.first_bias, expert)
    parts: Sequence[Tensor] = first.chunk(experts.parts, dim=-1)
    if entries is not None:
        inputs = entries.split(x)
        parts = [part + entries.update(inputs, number) for number, part in enumerate(parts)]
    inner = experts.inner(*parts)
    output = _with_bias(_products(inner, experts.down, ends), experts.down_bias, expert)
    if entries is not None:
        output = output + entries.update(entries.split(inner), DOWN)
    return output


class _Entries:
    """Entries sorted by expert, and which of them belong to each update.

    `sizes`: entries before the first update, of it, between it and the second one, and so on. `order`: the entries in
    that order; None if they are in it. `ends`: of each update, where the entries of each expert end."""

    def __init__(
        self, updates: Sequence[ExpertsUpdate], sizes: Sequence[int], order: Tensor | None, ends: Sequence[Tensor]
    ) -> None:
        self.updates = updates
        self._sizes = list(sizes)
        self._order = order
        self._ends = ends
        if order is not None:
            self._back = _inverse(order)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """The entries' rows [entries, inputs] in parts of the sizes above."""
        return (x if self._order is None else x[self._order]).split(self._sizes)

    def update(self, parts: Sequence[Tensor], projection: int) -> Tensor:
        """All updates of one projection, [entries, outputs]: of a part of the first product, by its number, or of
        `DOWN`. Zero where no adapter is."""
        pairs = [update.down if projection == DOWN else update.first[projection] for update in self.updates]
        made: list[Tensor] = []
        outputs = pairs[0][1].shape[1]
        for number, part in enumerate(parts):
            if number % 2 == 0 or not len(part):
                made.append(part.new_zeros(len(part), outputs))
            else:
                which = number // 2
                scale = self.updates[which].scales[projection]
                made.append(_low_rank(part, pairs[which], self._ends[which], scale))
        if self._order is None:
            return made[1]
        return torch.cat(made)[self._back]


def _entries_of_rows(
    row: Tensor, expert: Tensor, experts: int, rows: int, per_row: int, updates: Sequence[ExpertsUpdate]
) -> _Entries:
    """row, expert: of each entry, int64 [entries]."""
    bounds = [bound for update in updates for bound in update[:2]]
    sizes = [(stop - start) * per_row for start, stop in zip([0, *bounds], [*bounds, rows], strict=True)]
    order: Tensor | None = None
    if sizes != [0, len(row), 0]:  # else the order is right already
        part = torch.searchsorted(_on_device(tuple(bounds), row.device), row, right=True)
        order = part.argsort(stable=True)
        expert = expert[order]
    ends = [_ends(one, experts) for one in expert.split(sizes)[1::2]]
    return _Entries(updates, sizes, order, ends)


def _entries_counted(counts: Tensor, updates: Sequence[ExpertsUpdate | None]) -> _Entries:
    """As `counted_entries`."""
    found = [update for update in updates if update is not None]
    places: list[int] = []  # of each part, among: before the first update, the first one, between, the second one, ...
    before = 0
    for update in updates:
        places.append(2 * before + (update is not None))
        before += update is not None
    of_place = counts.new_zeros(len(counts), 2 * len(found) + 1)
    of_place.index_add_(1, _on_device(tuple(places), counts.device), counts)
    sizes = of_place.sum(dim=0).tolist()
    order: Tensor | None = None
    if len(found) > 1 or sizes != [0, sum(sizes), 0]:
        place_of = _on_device(tuple(range(len(sizes))), counts.device).repeat(len(counts))
        order = place_of.repeat_interleave(of_place.flatten()).argsort(stable=True)
    return _Entries(found, sizes, order, of_place[:, 1::2].T.cumsum(1).to(torch.int32).unbind(0))


@functools.lru_cache(maxsize=8)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64. Every layer of a micro-batch asks for the same numbers; a copy to a GPU waits for the GPU."""
    return torch.tensor(numbers, device=device)


def _low_rank(x: Tensor, pair: LoraPair, ends: Tensor, scale: float) -> Tensor:
    """scale * (x A_e^T) B_e^T. The rank is padded with zeros to what `grouped_mm` takes."""
    lora_a, lora_b = pair
    more = -lora_a.shape[1] % (_ALIGNMENT // x.element_size())
    if more:
        lora_a, lora_b = pad(lora_a, (0, 0, 0, more)), pad(lora_b, (0, more))
    return _products(_products(x, lora_a, ends) * scale, lora_b, ends)


def _with_bias(product: Tensor, bias: Tensor | None, expert: Tensor) -> Tensor:
    """product [entries, outputs] plus the bias of each entry's expert. The backward of `index_select` adds the entries
    in their order on a CPU; that of an index adds them by atomics."""
    return product if bias is None else product + bias.index_select(0, expert).to(product.dtype)


def _products(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """x M_e^T for the expert e of each row, in x's dtype. x: [entries, inputs]; matrices: [experts, outputs, inputs];
    ends: see `_ends`. Returns [entries, outputs]."""
    product: Tensor = _Products.apply(x, matrices, ends)  # type: ignore[no-untyped-call]
    return product


class _Products(Function):
    """`grouped_mm`, but it keeps the matrices as they are for the backward, not their copies in x's dtype; and experts
    without rows get a gradient of zero: on some GPUs torch leaves it uninitialized (its issue 172439)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, matrices, ends)
        return grouped_mm(x, matrices.to(x.dtype).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, matrices, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x, of_matrices = None, None
        if ctx.needs_input_grad[0]:
            of_x = grouped_mm(gradient, matrices.to(gradient.dtype), offs=ends)
        if ctx.needs_input_grad[1]:
            of_matrices = of_used_experts(grouped_mm(gradient.T, x, offs=ends), ends).to(matrices.dtype)
        return of_x, of_matrices, None


def _ends(sorted_experts: Tensor, experts: int) -> Tensor:
    """Where each expert's entries end, int32 [experts]."""
    numbers = torch.arange(experts, device=sorted_experts.device)
    return torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
