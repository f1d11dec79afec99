"""Adapters' matrices by slot, each where its adapter has it.

Knows tensors, and what vLLM's linear layers do with the tensor that has all slots. Knows no layers and no files.
"""

from __future__ import annotations

import torch


class Slots:
    """The matrices A or B of one slice of a linear layer, by slot, in the place of vLLM's tensor of the shape
    [slots, 1, rows, columns], in which a matrix of a smaller rank is padded with zeros.

    Has what `set_lora` and `reset_lora` of vLLM's layers do with that tensor."""

    def __init__(self, stacked: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = stacked.shape, stacked.dtype, stacked.device
        self._held: list[torch.Tensor | None] = [None] * stacked.shape[0]

    def of(self, slot: int) -> torch.Tensor | None:
        """[rows, columns] of the adapter itself. None: the adapter leaves the layer as it is."""
        return self._held[slot]

    def forget(self, slot: int) -> None:
        self._held[slot] = None

    def __setitem__(self, slot: int, zero: int) -> None:
        assert zero == 0
        self.forget(slot)

    def __getitem__(self, place: tuple[int, int, slice, slice]) -> _Place:
        slot, zero, *ends = place
        assert zero == 0
        return _Place(self, slot, tuple(end.stop for end in ends))

    def put(self, slot: int, matrix: torch.Tensor) -> None:
        """Raises ValueError for a matrix that is larger than a slot."""
        if any(size > most for size, most in zip(matrix.shape, self.shape[2:], strict=True)):
            raise ValueError(f"a matrix {tuple(matrix.shape)} does not fit a slot {tuple(self.shape[2:])}")
        self._held[slot] = matrix.to(self.device, self.dtype)


class _Place:
    """A part of a slot, which vLLM fills as a whole."""

    def __init__(self, slots: Slots, slot: int, shape: tuple[int, ...]) -> None:
        self._slots, self._slot, self._shape = slots, slot, shape

    def copy_(self, matrix: torch.Tensor, non_blocking: bool = False) -> None:
        assert tuple(matrix.shape) == self._shape
        self._slots.put(self._slot, matrix)
