"""How an item of a micro-batch becomes rows: its ranges one after the other, with pictures, in groups for attention;
and the grids that attention computes on, made once for all layers.

Laying out and grouping depend on what runs as one alone: a pass, or joined passes. Other passes do not change them.

A grid holds segments of one length, each with the keys and values of the prefix that it continues. All grids lie one
after the other, so a layer takes the rows of all of them with one index, and puts the results back with another one.
Grids of one shape are one call of attention, whichever slices they belong to. Knows lengths, token ids and pictures'
embeddings. Knows nothing of heads, kernels, adapters or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.device import HOST, moved, uploaded
from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.prefixes import Layout, bundled, experts_of, lay_out, prefix_tree, similar
from skyrl.trainer.shares import SequencePart
from skyrl.trainer.vision import Seen


@dataclass(frozen=True)
class PictureRows:
    """The pictures of a slice, on the device. rows: int64 [P], ascending, the rows of the slice that hold a picture.
    embeddings: [P, hidden]. `deepstack`: of each layer that adds some, [P, hidden]. positions: int64 [3, rows of the
    slice], in time, height and width."""

    rows: Tensor
    embeddings: Tensor
    deepstack: tuple[Tensor, ...]
    positions: Tensor

    @staticmethod
    def of(data: Sequence[Datum], layout: Layout, seen: Mapping[str, Seen], device: torch.device) -> PictureRows | None:
        """None if no sequence has a picture. layout: of `data`; `seen`: every picture, by digest."""
        if not any(datum.pictures for datum in data):
            return None
        digests = list(dict.fromkeys(picture.digest for datum in data for picture in datum.pictures))
        looked = [seen[digest] for digest in digests]
        starts = np.cumsum([0, *(each.tokens for each in looked)])
        first = dict(zip(digests, starts[:-1].tolist(), strict=True))
        places = layout.of_rows([_places(datum, first) for datum in data])
        rows = np.flatnonzero(places >= 0)
        chosen = torch.from_numpy(places[rows])

        def of_rows(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts)).index_select(0, chosen)

        made = PictureRows(
            torch.from_numpy(rows),
            of_rows([each.embeddings for each in looked]),
            tuple(of_rows(of_layer) for of_layer in zip(*(each.deepstack for each in looked), strict=True)),
            torch.from_numpy(layout.of_rows([positions_of(datum, seen).T for datum in data]).T.copy()),
        )
        return moved([made], device)[0]


def _places(datum: Datum, first: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """For each token its place among the embeddings of all pictures, -1 for text. `first`: the places of the first
    token of each picture, by digest."""
    places = np.full(len(datum.tokens), -1, np.int64)
    for picture in datum.pictures:
        places[picture.start : picture.stop] = first[picture.digest] + np.arange(picture.tokens)
    return places


def positions_of(datum: Datum, seen: Mapping[str, Seen]) -> npt.NDArray[np.int64]:
    """The positions of a sequence's tokens in time, height and width, int64 [3, N]: the multimodal rotary positions of
    Qwen2-VL (arXiv 2409.12191, section 2.1).

    Text counts on in all three. A picture's tokens have one time, and heights and widths counted from it. The text
    behind counts on from the largest of them."""
    positions = np.empty((3, len(datum.tokens)), np.int64)
    done, following = 0, 0
    """Tokens that have positions, and the position of the next one."""
    for picture in datum.pictures:
        text = picture.start - done
        positions[:, done : picture.start] = following + np.arange(text)
        following += text
        height, width = seen[picture.digest].grid
        grid = np.indices((1, height, width)).reshape(3, -1)
        positions[:, picture.start : picture.stop] = following + grid
        following += max(height, width)
        done = picture.stop
    positions[:, done:] = following + np.arange(len(datum.tokens) - done)
    return positions


@dataclass(frozen=True)
class AttentionGroup:
    """Segments of similar length that attend together. `lengths`: of each, the longest first.

    The groups of a slice cover its rows, in order. `pieces`: the rows of the group, cut into pieces: a segment that
    others continue is a piece alone. `prefix`: the pieces of the slice, by number, that all segments of the group
    continue, in order.
    """

    lengths: tuple[int, ...]
    pieces: tuple[int, ...]
    prefix: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return self.lengths[0]


@dataclass(frozen=True)
class PackedItem:
    """Rows [start, stop) of a micro-batch, which hold one slice. tokens, positions: int64 [stop - start]; positions
    count tokens. `layout`: the rows of each sequence, counted from `start`. experts: int32 [stop - start, layers * k],
    the experts that each row must use (-1: any); None if no sequence names any. `pictures`: None if no sequence has
    one. `part`: the slice is a part of one sequence, of which other ranks have the other rows, and is alone in its
    micro-batch."""

    start: int
    stop: int
    tokens: Tensor
    positions: Tensor
    groups: tuple[AttentionGroup, ...]
    layout: Layout
    experts: Tensor | None = None
    pictures: PictureRows | None = None
    part: SequencePart | None = None


def cut(lengths: Sequence[int], budget: int) -> list[range]:
    """Consecutive ranges of items with at most `budget` rows each. A longer item has its own range."""
    runs: list[range] = []
    first, total = 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > budget:
            runs.append(range(first, index))
            first, total = index, 0
        total += length
    return [*runs, range(first, len(lengths))] if lengths else []


_NOTHING_SEEN: Mapping[str, Seen] = {}


def pack_alone(data: Sequence[Datum], device: torch.device, seen: Mapping[str, Seen] = _NOTHING_SEEN) -> PackedItem:
    """Pack sequences that are no slice of a pass, from row 0. `seen`: every picture, by digest."""
    return pack(data, lay_out(prefix_tree(data), range(len(data))), 0, device, seen)


def pack(
    data: Sequence[Datum],
    layout: Layout,
    start: int,
    device: torch.device,
    seen: Mapping[str, Seen] = _NOTHING_SEEN,
) -> PackedItem:
    """The rows of one slice from row `start`. layout: of `data`. `seen`: every picture, by digest."""
    tokens = layout.of_rows([datum.tokens for datum in data])
    positions = np.concatenate([segment.start + np.arange(segment.rows) for segment in layout.segments])
    experts = experts_of(data)
    made = PackedItem(
        start=start,
        stop=start + len(tokens),
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        groups=tuple(_groups(layout)),
        layout=layout,
        experts=None if experts is None else torch.from_numpy(layout.of_rows(experts)),
        pictures=PictureRows.of(data, layout, seen, HOST),
    )
    return moved([made], device)[0]


def _groups(layout: Layout) -> Iterator[AttentionGroup]:
    segments = layout.segments
    continued = {segment.parent for segment in segments}
    piece_of: dict[int, int] = {}
    pieces = 0
    for members in similar(segments):
        sizes: list[int] = []
        open_piece = False
        for number in members:
            if number in continued:
                piece_of[number] = pieces + len(sizes)
            if open_piece and number not in continued:
                sizes[-1] += segments[number].rows
            else:
                sizes.append(segments[number].rows)
            open_piece = number not in continued
        pieces += len(sizes)
        prefix: list[int] = []
        parent = segments[members[0]].parent
        while parent >= 0:
            prefix.append(piece_of[parent])
            parent = segments[parent].parent
        lengths = tuple(segments[number].rows for number in members)
        yield AttentionGroup(lengths, tuple(sizes), tuple(prefix[::-1]))


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

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of queries and keys, counted from the first key of their segment: int64 [queries] and [keys]."""
        own = self.before + torch.arange(self.longest, device=device).repeat(self.together)
        return own, torch.cat([torch.arange(self.before, device=device), own])


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


def placed(slices: Sequence[Sequence[AttentionGroup]]) -> Iterator[tuple[AttentionGroup, int, Rows]]:
    """Each group, its first row, and the rows of its prefix, int64 [before]. slices: as for `Grids.of`."""
    start = 0
    for groups in slices:
        rows_of: list[Rows] = []
        for group in groups:
            ends = start + np.cumsum(group.pieces)
            rows_of += [np.arange(end - size, end) for end, size in zip(ends, group.pieces, strict=True)]
            yield group, start, np.concatenate([np.empty(0, np.int64), *(rows_of[number] for number in group.prefix)])
            start = int(ends[-1])


def in_window(prefix: Rows, window: int | None) -> Rows:
    """The rows of a prefix that the first row after it sees."""
    return prefix if window is None else prefix[len(prefix) - min(len(prefix), window - 1) :]


def _pieces(slices: Sequence[Sequence[AttentionGroup]], window: int | None) -> Iterator[Any]:
    for group, start, whole in placed(slices):
        prefix = in_window(whole, window)
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
    made = uploaded(arrays, device)
    return Indices(made[0], made[1]), Indices(made[2], made[3], (made[4], made[5]) if len(copied) else None)


def sum_of_cells(cells: Tensor, holders: Tensor, firsts: Tensor) -> Tensor:
    """[rows, ...]: for each row the sum of the cells [cells, ...] that hold it; 0 if none does. holders, firsts: as
    `Indices.holders`. Adds cells of a row in their order, also on CUDA, where sums by index need a sort for that."""
    of_rows = torch.nn.functional.embedding_bag(holders, cells.reshape(len(cells), -1), firsts, mode="sum")
    return of_rows.view(-1, *cells.shape[1:])


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
        return sum_of_cells(gradients[0], *indices.holders), None


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
