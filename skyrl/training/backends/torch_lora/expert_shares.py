"""Which experts of each layer a rank holds, and where these lie in an adapter's flat buffers.

A rank's buffers have everything that is no expert's, and of the experts the rank's own: so they are some parts of the
whole adapter's buffers, one after the other. Knows shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

EXPERTS_NDIM = 3
"""Matrices of experts, [experts, ...], have a dimension more than others."""


@dataclass(frozen=True)
class ExpertShare:
    """The experts of rank `rank` of `ranks`: a block of each layer's. Blocks differ by one expert at most; with fewer
    experts than ranks some ranks hold none."""

    rank: int
    ranks: int

    def of(self, experts: int) -> range:
        """The numbers of this rank's experts of a layer."""
        return range(experts * self.rank // self.ranks, experts * (self.rank + 1) // self.ranks)

    def of_matrices(self, matrices: Tensor) -> Tensor:
        """A view of what this rank holds of an adapter's matrices."""
        if matrices.ndim != EXPERTS_NDIM:
            return matrices
        held = self.of(len(matrices))
        return matrices[held.start : held.stop]

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of `of_matrices`."""
        return (len(self.of(shape[0])), *shape[1:]) if len(shape) == EXPERTS_NDIM else shape

    def slices(self, shapes: Mapping[str, tuple[int, ...]]) -> list[slice]:
        """The parts of an adapter's whole flat buffer, ascending, that make this rank's buffer. shapes: of the whole
        adapter's matrices, in the order of its buffers."""
        found: list[slice] = []
        offset = 0
        for shape in shapes.values():
            held, width = range(shape[0]), math.prod(shape[1:])
            if len(shape) == EXPERTS_NDIM:
                held = self.of(shape[0])
            found.append(slice(offset + held.start * width, offset + held.stop * width))
            offset += math.prod(shape)
        return found


EVERY_EXPERT = ExpertShare(0, 1)


def common_numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many elements of an adapter belong to no expert. They come first in its buffers."""
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) != EXPERTS_NDIM)


def joined(parts: Sequence[npt.NDArray[np.float32]], shapes: Mapping[str, tuple[int, ...]]) -> npt.NDArray[np.float32]:
    """The whole flat buffer from those of all ranks, by rank. What all ranks hold is rank 0's."""
    whole = np.empty(sum(math.prod(shape) for shape in shapes.values()), np.float32)
    for rank in reversed(range(len(parts))):
        offset = 0
        for place in ExpertShare(rank, len(parts)).slices(shapes):
            count = place.stop - place.start
            whole[place] = parts[rank][offset : offset + count]
            offset += count
    return whole
