"""Where attention finds the rows of a micro-batch: the grids that it computes on, made once for all layers.

A grid holds segments of one length, each with the keys and values of the prefix that it continues. All grids lie one
after the other, so a layer takes the rows of all of them with one index, and puts the results back with another one.
Grids of one shape are one call of attention, whichever slices they belong to. Knows numbers of rows. Knows nothing of
heads, kernels or adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.rows.packing import AttentionGroup
from skyrl.trainer.rows.prefixes import bundled

Rows = npt.NDArray[np.int64]


class Shape(NamedTuple):
    """Of a grid. A bundle is `together` segments of `longest` rows, behind `before` rows of their prefix."""

    longest: int
    together: int
    before: int

    @property
    def queries(self) -> int:
        return self.together * self.longest

    @property
    def keys(self) -> int:
        return self.before + self.queries


@dataclass(frozen=True)
class Indices:
    """Which row each cell of the grids holds, and back. Cells after a segment's end hold its last row.

    cells: int64 [cells], the row of each cell; places: int64 [rows], the cell where the row is for itself. `holders`:
    int64 [holders], the cells that hold each row, those of one row after those of another, and int64 [rows], where
    those of each row begin. None: no row is in several cells, but for those after a segment's end."""

    cells: Tensor
    places: Tensor
    holders: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Grids:
    """`calls`: the shape of the grids of each call of attention, and how many bundles they have together. queries,
    keys: of the cells of all calls, one after the other; None: the cells are the rows, in their order."""

    calls: tuple[tuple[Shape, int], ...]
    queries: Indices | None
    keys: Indices | None

    @staticmethod
    def of(slices: Sequence[Sequence[AttentionGroup]], window: int | None, device: torch.device) -> Grids:
        """slices: the groups of each slice, which cover the rows in order. window: only so many keys are seen."""
        pieces = [_Piece(shape, *rows) for shape, *rows in _pieces(slices, window)]
        in_order = all(piece.real is None and not piece.shape.before for piece in pieces)
        if not in_order:  # else the rows need not be moved, and only neighbours of one shape are one call
            first: dict[Shape, int] = {}
            for number, piece in enumerate(pieces):
                first.setdefault(piece.shape, number)
            pieces.sort(key=lambda piece: first[piece.shape])
        calls: list[tuple[Shape, int]] = []
        for piece in pieces:
            if calls and calls[-1][0] == piece.shape:
                calls[-1] = piece.shape, calls[-1][1] + piece.bundles
            else:
                calls.append((piece.shape, piece.bundles))
        if in_order:
            return Grids(tuple(calls), None, None)
        return Grids(tuple(calls), *_indices(pieces, device))


@dataclass(frozen=True)
class _Piece:
    """The grid of one group. own: int64 [bundles, queries], the row of each cell; prefix: int64 [before]. real: bool
    [bundles, queries], whether the cell holds a row for itself; None: all do."""

    shape: Shape
    own: Rows
    prefix: Rows
    real: npt.NDArray[np.bool_] | None

    @property
    def bundles(self) -> int:
        return len(self.own)


def _pieces(slices: Sequence[Sequence[AttentionGroup]], window: int | None) -> Iterator[Any]:
    start = 0
    for groups in slices:
        rows_of: list[Rows] = []
        for group in groups:
            ends = start + np.cumsum(group.pieces)
            rows_of += [np.arange(end - size, end) for end, size in zip(ends, group.pieces, strict=True)]
            prefix = np.concatenate([np.empty(0, np.int64), *(rows_of[number] for number in group.prefix)])
            if window is not None:
                prefix = prefix[len(prefix) - min(len(prefix), window - 1) :]
            together = bundled(group.count, group.longest, len(prefix)) if len(prefix) else 1
            lengths = np.array(group.lengths)
            lacking = -group.count % together
            firsts = start + np.cumsum(lengths) - lengths
            # a bundle that lacks segments is filled up with the last one
            lengths, firsts = (np.pad(each, (0, lacking), mode="edge") for each in (lengths, firsts))
            place = np.arange(group.longest)
            own = firsts[:, None] + np.minimum(place, lengths[:, None] - 1)
            real = place < lengths[:, None]
            real[group.count :] = False
            shape = Shape(group.longest, together, len(prefix))
            yield shape, own.reshape(-1, shape.queries), prefix, None if real.all() else real.reshape(-1, shape.queries)
            start = int(ends[-1])


def _indices(pieces: Sequence[_Piece], device: torch.device) -> tuple[Indices, Indices]:
    """Of queries, and of keys."""
    queries, keys, of_queries, of_keys, copies = ([np.empty(0, np.int64)] for _ in range(5))
    row_of: list[Rows] = []
    before_queries = before_keys = 0
    for piece in pieces:
        shape, bundles = piece.shape, piece.bundles
        cells = before_queries + np.arange(piece.own.size).reshape(bundles, -1)
        key_cells = before_keys + np.arange(bundles * shape.keys).reshape(bundles, -1)
        real = np.ones_like(piece.own, np.bool_) if piece.real is None else piece.real
        queries.append(piece.own.reshape(-1))
        keys.append(np.hstack([np.broadcast_to(piece.prefix, (bundles, shape.before)), piece.own]).reshape(-1))
        row_of.append(piece.own[real])
        of_queries.append(cells[real])
        of_keys.append(key_cells[:, shape.before :][real])
        copies.append(key_cells[:, : shape.before].reshape(-1))
        before_queries, before_keys = before_queries + cells.size, before_keys + key_cells.size
    order = np.argsort(np.concatenate(row_of))
    of_queries, of_keys = (np.concatenate(each)[order] for each in (of_queries, of_keys))
    cells, copied = np.concatenate(keys), np.concatenate(copies)
    holders = np.concatenate([of_keys, copied])
    rows = np.concatenate([np.arange(len(of_keys)), cells[copied]])
    firsts = np.searchsorted(np.sort(rows), np.arange(len(of_keys)))
    arrays = [np.concatenate(queries), of_queries, cells, of_keys, holders[np.argsort(rows, kind="stable")], firsts]
    made = [torch.from_numpy(array).to(device) for array in arrays]
    return Indices(made[0], made[1]), Indices(made[2], made[3], (made[4], made[5]) if len(copied) else None)


class IntoCells(torch.autograd.Function):
    """Rows [rows, ...] as cells [cells, ...]. Gradients of cells after a segment's end are zero, so they are left
    out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Indices) -> Tensor:
        ctx.indices = indices
        return rows.index_select(0, indices.cells)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        indices: Indices = ctx.indices
        if indices.holders is None:
            return gradients[0].index_select(0, indices.places), None
        # adds the cells of each row in their order, also on CUDA, where sums by index need a sort for that
        flat = gradients[0].reshape(len(indices.cells), -1)
        of_rows = torch.nn.functional.embedding_bag(indices.holders[0], flat, indices.holders[1], mode="sum")
        return of_rows.view(-1, *gradients[0].shape[1:]), None


class FromCells(torch.autograd.Function):
    """Cells [cells, ...] as rows [rows, ...], without those after a segment's end."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, indices: Indices) -> Tensor:
        ctx.indices, ctx.cells = indices, len(cells)
        return cells.index_select(0, indices.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        zeros = gradients[0].new_zeros(ctx.cells, *gradients[0].shape[1:])
        return zeros.index_copy_(0, ctx.indices.places, gradients[0]), None
