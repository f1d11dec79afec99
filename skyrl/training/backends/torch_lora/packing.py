"""How a slice becomes rows: its segments one after the other, in groups for attention.

Laying out and grouping depend on what runs as one alone: a pass, or joined passes. Other passes do not change them.
Knows lengths and token ids. Knows nothing of adapters or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.picture_rows import PictureRows
from skyrl.training.backends.torch_lora.prefixes import Layout, lay_out, prefix_tree
from skyrl.training.backends.torch_lora.routed_experts import experts_of
from skyrl.training.backends.torch_lora.segments import similar
from skyrl.training.backends.torch_lora.sequence_part import SequencePart
from skyrl.training.backends.torch_lora.vision import Seen


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
class PackedSlice:
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


def pack_alone(data: Sequence[Datum], device: torch.device, seen: Mapping[str, Seen] = _NOTHING_SEEN) -> PackedSlice:
    """Pack sequences that are no slice of a pass, from row 0. `seen`: every picture, by digest."""
    return pack(data, lay_out(prefix_tree(data), range(len(data))), 0, device, seen)


def pack(
    data: Sequence[Datum],
    layout: Layout,
    start: int,
    device: torch.device,
    seen: Mapping[str, Seen] = _NOTHING_SEEN,
) -> PackedSlice:
    """The rows of one slice from row `start`. layout: of `data`. `seen`: every picture, by digest."""
    tokens = layout.of_rows([datum.tokens for datum in data])
    positions = np.concatenate([segment.start + np.arange(segment.rows) for segment in layout.segments])
    experts = experts_of(data)
    return PackedSlice(
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
