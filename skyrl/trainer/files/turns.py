"""Two projections whose rows a release's files hold in turns, in one tensor: Inkling's gate and up.

transformers' model has them one after the other, or as two parameters. Knows shapes and places alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turns:
    """Rows along dimension `dim` of a files' tensor of the shape `whole`. `one`: which of the projections is meant, 0
    or 1; None: both, in each item of the dimensions before the second one's rows behind the first one's."""

    whole: tuple[int, ...]
    dim: int
    one: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is meant."""
        parts = 1 if self.one is None else 2
        return *self.whole[: self.dim], self.whole[self.dim] // parts, *self.whole[self.dim + 1 :]

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Where the elements [begin, end) are in the files' tensor: the place there, and begin and end, of parts that
        lie together."""
        width = math.prod(self.whole[self.dim + 1 :])
        while begin < end:
            row, column = divmod(begin, width)
            stop = min(end, begin - column + width)
            yield self._row_of(row) * width + column, begin, stop
            begin = stop

    def _row_of(self, row: int) -> int:
        if self.one is not None:
            return 2 * row + self.one
        both = self.whole[self.dim]
        item, within = divmod(row, both)
        second, turn = divmod(within, both // 2)
        return item * both + 2 * turn + second


@dataclass(frozen=True)
class InTurns:
    """A parameter whose rows are so in the tensor `name`, of which `stored` reads parts."""

    name: str
    stored: Any
    turns: Turns

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        raise ValueError(f"its files hold {self.name} with rows of two projections in turns")

    @property
    def form(self) -> None:
        """Its numbers are not kept in fewer bits."""

    def get_shape(self) -> list[int]:
        return list(self.turns.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        dim, one = self.turns.dim, self.turns.one
        if dim > 0:
            both = self.stored[rows].unflatten(dim, (-1, 2)).unbind(dim + 1)
            return torch.cat(both, dim=dim) if one is None else both[one]
        if one is None:
            whole = self.stored[:]
            return torch.cat([whole[0::2], whole[1::2]])[rows]
        start, stop, _ = rows.indices(self.turns.shape[0])
        return self.stored[2 * start : 2 * stop][one::2]
