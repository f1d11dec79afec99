"""How an item of a micro-batch becomes rows: its ranges one after the other, in groups for attention, with pictures.

Laying out and grouping depend on what runs as one alone: a pass, or joined passes. Other passes do not change them.
Knows lengths, token ids and pictures' embeddings. Knows nothing of adapters or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.prefixes import Layout, lay_out, prefix_tree, similar
from skyrl.trainer.rows.routed_experts import experts_of
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
            return torch.cat(list(parts)).index_select(0, chosen).to(device)

        return PictureRows(
            torch.from_numpy(rows).to(device),
            of_rows([each.embeddings for each in looked]),
            tuple(of_rows(of_layer) for of_layer in zip(*(each.deepstack for each in looked), strict=True)),
            torch.from_numpy(layout.of_rows([positions_of(datum, seen).T for datum in data]).T.copy()).to(device),
        )


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
    return PackedItem(
        start=start,
        stop=start + len(tokens),
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        groups=tuple(_groups(layout)),
        layout=layout,
        experts=None if experts is None else torch.from_numpy(layout.of_rows(experts)).to(device),
        pictures=PictureRows.of(data, layout, seen, device),
    )


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
