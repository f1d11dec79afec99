"""What the model has computed of a micro-batch: logprobs of every segment, and values of those with a value head.

A rank's part of a long sequence is put together with those of the other ranks, on which each computes the loss. Knows
the order of a model's outputs. Knows nothing of losses or of what a row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl.trainer.collectives import gathered
from skyrl.trainer.device import uploaded
from skyrl.trainer.lora.adapter import Buffers
from skyrl.trainer.rows.packing import PackedItem
from skyrl.trainer.shares import SequencePart


@dataclass(frozen=True)
class Outputs:
    """`of_model`: of `PackedModel.forward`: the logprobs of each of `segments`, float32 [entries], then the values of
    each that has a head, float32 [positions]. `part`: the rows that this rank has of the only sequence."""

    of_model: Sequence[Tensor]
    segments: int
    part: SequencePart | None = None

    @property
    def logprobs(self) -> Tensor:
        """Of all entries, float32 [entries]."""
        return self._whole(self.of_model[: self.segments])

    @property
    def values(self) -> Tensor | None:
        """Of all positions of sequences whose adapters have a head, float32 [positions]."""
        of_heads = self.of_model[self.segments :]
        return self._whole(of_heads) if of_heads else None

    def of_entries(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Further numbers of this rank's entries, each [entries], as those of all entries."""
        return [self._whole([each]) for each in own]

    def starts(self, of_logprobs: Tensor, of_values: Tensor | None) -> list[Tensor]:
        """Where the backward begins: the gradients with respect to `of_model`, from those to both of the above."""
        found = self._parts(of_logprobs, self.of_model[: self.segments])
        return found if of_values is None else [*found, *self._parts(of_values, self.of_model[self.segments :])]

    def _whole(self, of_segments: Sequence[Tensor]) -> Tensor:
        found = of_segments[0] if len(of_segments) == 1 else torch.cat([*of_segments])
        if self.part is None:
            return found
        width = self._width(found)
        return gathered(found.detach(), [self.part.rows_of(rank) * width for rank in range(self.part.ranks)])

    def _parts(self, gradient: Tensor, of_segments: Sequence[Tensor]) -> list[Tensor]:
        if self.part is not None:
            width = self._width(of_segments[0])
            gradient = gradient[self.part.start * width : self.part.stop * width]
        return [*gradient.split([len(each) for each in of_segments])]

    def _width(self, own: Tensor) -> int:
        """Entries of a row."""
        assert self.part is not None
        return len(own) // (self.part.stop - self.part.start)


def value_rows_of(model: Buffers, packed: PackedItem) -> Tensor | None:
    """`LoraSegment.value_rows` of a slice."""
    if not model.has_value_head:
        return None
    return uploaded([np.concatenate(packed.layout.rows_of)], model.device)[0]
