"""Products of frozen layers that read the same rows, with the low-rank updates of adapters: forward and backward.

No autograd: those who call it keep what the backward needs. The base model's product is one product over all rows for
each layer. Of the layers that one input goes to, such as the projections to queries, keys and values, an adapter's
lora_A are one matrix: so the input is read once for all of them, forward and backward. Each update is added to its
slice of the result in place: no row is copied, and no zeros are computed for rows without an adapter. Each gradient
comes from the rows of its own adapter alone, so numbers that are not finite stay with their tenant. Knows nothing of
modules, of which rows belong to whom, or of the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from skyrl.trainer.kernels.between import AddGrouped, add_grouped
from skyrl.trainer.kernels.dense import linear, product_into, sum_over_rows


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
    where the rows of each end, counted from `start`. `add`: what adds a product with their matrices to rows.
    `may_lack_rows`: an adapter may have none of the rows."""

    start: int
    stop: int
    lora_a: Tensor
    lora_b: Tensor
    ends: Tensor
    add: AddGrouped = add_grouped
    may_lack_rows: bool = False


Update = RowsUpdate | StackedUpdate


class Frozen(NamedTuple):
    """A layer x W^T + bias. weight [out_features, in_features], bias [out_features]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Joined:
    """The updates of some layers with one input by one segment of rows, without their matrices. layers: which of the
    layers have one, ascending; `scales` and `ranks` of each. ends, add, may_lack_rows: as in `StackedUpdate`; without
    `ends` the rows are one adapter's."""

    start: int
    stop: int
    layers: tuple[int, ...]
    scales: tuple[float, ...]
    ranks: tuple[int, ...]
    ends: Tensor | None = None
    add: AddGrouped = add_grouped
    may_lack_rows: bool = False

    @staticmethod
    def of(updates: Sequence[Sequence[Update]]) -> tuple[list[Joined], list[Tensor]]:
        """Also the matrices: of each segment lora_a and lora_b of each of its layers. updates: of each layer, each in
        the order of the rows."""
        found: dict[int, list[tuple[int, Update]]] = {}
        for layer, of_layer in enumerate(updates):
            for update in of_layer:
                found.setdefault(update.start, []).append((layer, update))
        joined: list[Joined] = []
        for of_segment in found.values():
            first = of_segment[0][1]
            scales = tuple(each.scale if isinstance(each, RowsUpdate) else 1.0 for _, each in of_segment)
            ranks = tuple(each.lora_a.shape[-2] for _, each in of_segment)
            layers = tuple(layer for layer, _ in of_segment)
            given = first.start, first.stop, layers, scales, ranks
            if isinstance(first, StackedUpdate):
                joined.append(Joined(*given, first.ends, first.add, first.may_lack_rows))
            else:
                joined.append(Joined(*given))
        return joined, [m for of in found.values() for _, each in of for m in (each.lora_a, each.lora_b)]

    @property
    def columns(self) -> list[slice]:
        """Of each layer's rank among those of all."""
        return [slice(*each) for each in pairwise([0, *accumulate(self.ranks)])]


def products(
    x: Tensor, layers: Sequence[Frozen], joined: Sequence[Joined], matrices: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's result on x [..., in_features], whose flattened rows the segments name, with the updates:
    [..., out_features] in x's dtype, in memory of its own. Also what `gradients` needs beside x: of each segment x
    lora_a^T of all its layers, then lora_a and lora_b of each."""
    outputs = [linear(x, *layer) for layer in layers]
    x, flat = x.reshape(-1, x.shape[-1]), [output.view(-1, output.shape[-1]) for output in outputs]
    kept: list[Tensor] = []
    each = iter(matrices)
    for segment in joined:
        pairs = [(next(each).to(x.dtype), next(each).to(x.dtype)) for _ in segment.layers]
        rows = _rows(x, segment)
        all_a = _one_below_another([lora_a for lora_a, _ in pairs])
        if segment.ends is None:
            low_rank = linear(rows, all_a)
        else:
            low_rank = grouped_mm(rows, all_a.transpose(1, 2), offs=segment.ends)
        for layer, columns, scale, (_, lora_b) in zip(
            segment.layers, segment.columns, segment.scales, pairs, strict=True
        ):
            of_rows, own = _rows(flat[layer], segment), _columns(low_rank, columns)
            if segment.ends is None:
                product_into(of_rows, own, lora_b.t(), scale=scale)
            else:
                segment.add(of_rows, own, lora_b.transpose(1, 2), segment.ends)
        kept += [low_rank, *(matrix for pair in pairs for matrix in pair)]
    return outputs, kept


def gradients(
    of_outputs: Sequence[Tensor],
    x: Tensor,
    layers: Sequence[Frozen],
    joined: Sequence[Joined],
    kept: Sequence[Tensor],
    *,
    of_input: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of x (None without `of_input`), and of the matrices in the order of `Joined.of`. of_outputs: of
    each layer [R, out_features]. `kept`: of `products`. Weights get none."""
    of_low_rank = of_low_ranks(of_outputs, joined, kept)
    of_x = input_gradient(of_outputs, layers, joined, kept, of_low_rank) if of_input else None
    return of_x, matrix_gradients(of_outputs, x, joined, kept, of_low_rank)


def of_low_ranks(of_outputs: Sequence[Tensor], joined: Sequence[Joined], kept: Sequence[Tensor]) -> list[Tensor]:
    """Of each segment the gradient of x lora_a^T: [its rows, ranks of all layers]. The arguments are those of
    `gradients`."""
    found: list[Tensor] = []
    for segment, (low_rank, _, of_b) in zip(joined, _of_segments(joined, kept), strict=True):
        found.append(torch.empty_like(low_rank))
        for layer, place, scale, lora_b in zip(segment.layers, segment.columns, segment.scales, of_b, strict=True):
            gradient, own = _rows(of_outputs[layer], segment), _columns(found[-1], place)
            if segment.ends is None:
                product_into(own, gradient, lora_b, scale=scale, keep=False)
            else:
                own.copy_(grouped_mm(gradient.contiguous(), lora_b, offs=segment.ends))
    return found


def input_gradient(
    of_outputs: Sequence[Tensor],
    layers: Sequence[Frozen],
    joined: Sequence[Joined],
    kept: Sequence[Tensor],
    of_low_rank: Sequence[Tensor],
) -> Tensor:
    """The gradient of x, [R, in_features]. of_low_rank: of `of_low_ranks`."""
    of_x = linear(of_outputs[0], layers[0].weight.t())
    for gradient, layer in zip(of_outputs[1:], layers[1:], strict=True):
        product_into(of_x, gradient, layer.weight)
    for segment, own, (_, of_a, _) in zip(joined, of_low_rank, _of_segments(joined, kept), strict=True):
        all_a = _one_below_another(of_a)
        if segment.ends is None:
            product_into(_rows(of_x, segment), own, all_a)
        else:
            segment.add(_rows(of_x, segment), own, all_a, segment.ends)
    return of_x


def matrix_gradients(
    of_outputs: Sequence[Tensor],
    x: Tensor,
    joined: Sequence[Joined],
    kept: Sequence[Tensor],
    of_low_rank: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of the matrices, in the order of `Joined.of`. x [R, in_features]."""
    found: list[Tensor] = []
    for segment, of_own, (low_rank, _, _) in zip(joined, of_low_rank, _of_segments(joined, kept), strict=True):
        own_x = _rows(x, segment)
        if segment.ends is None:
            of_all_a = sum_over_rows(of_own, own_x)
        else:
            of_all_a = _of_adapters(grouped_mm(of_own.t(), own_x, offs=segment.ends), segment)
        for layer, place, scale in zip(segment.layers, segment.columns, segment.scales, strict=True):
            gradient, own = _rows(of_outputs[layer], segment), _columns(low_rank, place)
            if segment.ends is None:
                of_lora_b = sum_over_rows(gradient, own, scale=scale)
            else:
                of_lora_b = _of_adapters(grouped_mm(gradient.contiguous().t(), own, offs=segment.ends), segment)
            found += [of_all_a[..., place, :], of_lora_b]
    return found


def _of_segments(
    joined: Sequence[Joined], kept: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]:
    """What `products` has kept of each segment: x lora_a^T of all layers, lora_a of each, and lora_b of each."""
    start = 0
    for segment in joined:
        stop = start + 1 + 2 * len(segment.layers)
        yield kept[start], kept[start + 1 : stop : 2], kept[start + 2 : stop : 2]
        start = stop


def _one_below_another(of_layers: Sequence[Tensor]) -> Tensor:
    """lora_a of some layers as one matrix [..., ranks, in_features]. Made again for the backward: a row of all inputs
    for each rank is more to keep than it is to copy."""
    return of_layers[0] if len(of_layers) == 1 else torch.cat([*of_layers], dim=-2)


def of_used_experts(gradient: Tensor, ends: Tensor) -> Tensor:
    """The gradient [experts, outputs, inputs], with zeros for experts without rows, whatever is there."""
    is_used = ends.diff(prepend=ends.new_zeros(1)) > 0
    return torch.where(is_used[:, None, None], gradient, 0)


def _of_adapters(gradient: Tensor, segment: Joined) -> Tensor:
    """Of a stack's matrices."""
    assert segment.ends is not None
    return of_used_experts(gradient, segment.ends) if segment.may_lack_rows else gradient


def _rows(tensor: Tensor, segment: Joined) -> Tensor:
    """The segment's rows. Without a view for all rows: a view costs as much as a small product."""
    start, stop = segment.start, segment.stop
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]


def _columns(tensor: Tensor, columns: slice) -> Tensor:
    return tensor if columns.stop - columns.start == tensor.shape[1] else tensor[:, columns]
