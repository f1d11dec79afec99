"""Attention of each query to the tokens that an indexer has chosen for it, over packed rows.

A choice is kept as bits: for each query one bit for each token of its sequence up to the end of its grid. So it needs
an eighth of a byte for each pair, and attention and its backward unpack a block of queries at a time. Grids whose
sequences are so short that every query sees all tokens before it have no bits, and are dense attention.
Knows grids of rows. Knows nothing of indexers or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skyrl.trainer.reused import Reused
from skyrl.trainer.rows.packing import Grids, Indices, Shape

_BITS = 8

Attend = Callable[..., Tensor]
"""As `packed_attention.attend`."""


@dataclass(frozen=True)
class Chosen:
    """Which keys the queries of the calls of some `Grids` attend to. bits: for each call uint8 [segments, longest,
    ceil((before + longest) / 8)], of each segment of its bundles in order, with the tokens of the prefix and then its
    own; None: all up to the query itself. Of a part of one sequence, whose rows are those of one call: with a bit for
    every token of the sequence."""

    bits: tuple[Tensor | None, ...]

    def of_rows(self, grids: Grids, rows: int) -> Tensor:
        """bool [rows, rows], which rows each row attends to: for few rows."""
        device = next((bits.device for bits in self.bits if bits is not None), torch.device("cpu"))
        seen = torch.zeros(rows, rows, dtype=torch.bool, device=device)
        for (shape, bundles), bits, (queries, keys, real) in zip(
            grids.calls, self.bits, _cells(grids, rows, device), strict=True
        ):
            segments = bundles * shape.together
            of_call = causal(shape, device).expand(segments, -1, -1) if bits is None else unpacked(bits, keys.shape[1])
            own = torch.zeros(segments, shape.longest, rows, dtype=torch.int32, device=device)
            own.scatter_add_(2, keys[:, None].expand(of_call.shape), of_call.int())  # several cells may hold a row
            seen[queries[real]] = own[real] > 0
        return seen

    @staticmethod
    def from_rows(seen: Tensor, grids: Grids) -> Chosen:
        """seen: as `of_rows` returns it."""
        cells = _cells(grids, len(seen), seen.device)
        of_calls = [seen[queries[..., None], keys[:, None]] for queries, keys, _ in cells]
        return Chosen(
            tuple(
                packed(of_call & causal(shape, seen.device))
                for of_call, (shape, _) in zip(of_calls, grids.calls, strict=True)
            )
        )


def _cells(grids: Grids, rows: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each call: int64 [segments, longest], the row of each query; int64 [segments, before + longest], that of each
    key; bool [segments, longest], whether the query is its row's own cell."""
    in_order = torch.arange(rows, device=device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    real = torch.ones(rows, dtype=torch.bool, device=device)
    queries = keys = in_order
    if grids.queries is not None and grids.keys is not None:
        queries, keys = grids.queries.cells, grids.keys.cells
        real = torch.zeros(len(queries), dtype=torch.bool, device=device)
        real[grids.queries.places] = True
    first_query = first_key = 0
    for shape, bundles in grids.calls:
        of_queries = slice(first_query, first_query + bundles * shape.queries)
        of_keys = slice(first_key, first_key + bundles * shape.keys)
        segments = queries[of_queries].view(-1, shape.longest), real[of_queries].view(-1, shape.longest)
        found.append((segments[0], by_segment(keys[of_keys], shape, bundles), segments[1]))
        first_query, first_key = of_queries.stop, of_keys.stop
    return found


def in_cells(rows: Tensor, indices: Indices | None) -> Tensor:
    """[rows, ...] as [cells, ...], without gradients."""
    return rows if indices is None else rows.index_select(0, indices.cells)


def by_segment(cells: Tensor, shape: Shape, bundles: int) -> Tensor:
    """What the cells of a call's keys hold, [bundles * keys, ...], as [segments, before + longest, ...]: each segment
    has what its bundle's prefix holds, too."""
    of_bundle = cells.unflatten(0, (bundles, shape.keys))
    own = of_bundle[:, shape.before :].unflatten(1, (shape.together, shape.longest))
    prefix = of_bundle[:, None, : shape.before].expand(-1, shape.together, *of_bundle[0, : shape.before].shape)
    return torch.cat([prefix, own], dim=2).flatten(0, 1)


def causal(shape: Shape, device: torch.device, rows: range | None = None) -> Tensor:
    """Which keys of its sequence each of a segment's `rows` (None: all) is not before: bool [rows, before + the last
    row's place + 1]."""
    chosen = range(shape.longest) if rows is None else rows
    places = torch.arange(shape.before + chosen.stop, device=device)
    return places[shape.before + chosen.start :, None] >= places


def packed(seen: Tensor) -> Tensor:
    """bool [..., keys] as uint8 [..., ceil(keys / 8)]."""
    lacking = -seen.shape[-1] % _BITS
    padded = torch.nn.functional.pad(seen, (0, lacking)).unflatten(-1, (-1, _BITS))
    return (padded * _powers(seen.device)).sum(-1, dtype=torch.uint8)


def unpacked(bits: Tensor, keys: int, first: int = 0) -> Tensor:
    """The keys [first, first + keys) of what `packed` made of them."""
    byte, skipped = divmod(first, _BITS)
    needed = bits[..., byte : -(-(first + keys) // _BITS), None]
    return (needed & _powers(bits.device)).bool().flatten(-2)[..., skipped : skipped + keys]


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(_BITS)], dtype=torch.uint8, device=device)


def attend_to_chosen(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    shape: Shape,
    *,
    scale: float | None,
    block_bytes: int,
) -> Tensor:
    """query [bundles, heads, queries, head_dim], key [bundles, kv_heads, keys, head_dim], value [bundles, kv_heads,
    keys, value_dim] of one call; bits: `Chosen.bits` of it. Returns [bundles, heads, queries, value_dim].

    As dense attention with a mask, in blocks of queries whose scores have `block_bytes` in float32, for all heads on a
    CPU and for one elsewhere, where kernels keep no scores but need the mask. With gradients and several blocks,
    backward computes each block again."""
    bundles, heads = query.shape[:2]
    of_query = 4 * bundles * shape.together * shape.keys * (heads if query.device.type == "cpu" else 1)
    step = max(1, block_bytes // of_query)
    queries = query.unflatten(2, (shape.together, shape.longest))
    keys, values = Reused(key), Reused(value)
    made: list[Tensor] = []
    for start in range(0, shape.longest, step):
        stop = min(shape.longest, start + step)
        # One segment alone: later keys are seen by no query of the block
        last = shape.before + stop if shape.together == 1 else shape.keys
        place = slice(None), slice(None), slice(last)
        given = queries[:, :, :, start:stop], keys.use(*place), values.use(*place), bits[:, start:stop]
        arguments = (attend, *given, shape, scale)
        if step < shape.longest and torch.is_grad_enabled():
            block: Any = checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            block = _block(*arguments)
        made.append(block)
    return torch.cat(made, dim=3).flatten(2, 3)


def _block(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, bits: Tensor, shape: Shape, scale: float | None
) -> Tensor:
    """query: [bundles, heads, together, rows, head_dim]; bits: [bundles * together, rows, ...]. Returns [bundles,
    heads, together, rows, value_dim]."""
    bundles, _, together, rows, _ = query.shape
    if together == 1:
        mask = unpacked(bits, key.shape[2])[:, None]
    else:
        seen = unpacked(bits, shape.before + shape.longest).unflatten(0, (bundles, together))
        own = seen.new_zeros(bundles, together, rows, together, shape.longest)
        for number in range(together):
            own[:, number, :, number] = seen[:, number, :, shape.before :]
        mask = torch.cat([seen[..., : shape.before], own.flatten(3)], dim=3).flatten(1, 2)[:, None]
    made = attend(query.flatten(2, 3), key, value, mask=mask, causal=False, scale=scale)
    return made.unflatten(2, (together, rows))
