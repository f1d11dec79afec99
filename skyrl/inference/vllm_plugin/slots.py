"""Adapters' matrices by slot, each where its adapter has it.

Knows tensors, and what vLLM's linear layers do with the tensor that has all slots. Knows no layers and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def check_sizes(layer: Any, names: Sequence[str], parts: Mapping[str, Any]) -> None:
    """Raise ValueError for matrices that the layer could not compute with: an error in the middle of a step ends vLLM
    for everybody. vLLM's own slots pad them with zeros. `names`: of the parts of a layer that joins several."""
    stacks = getattr(layer, "lora_a_stacked", ())
    if not (isinstance(stacks, tuple) and stacks and isinstance(stacks[0], Slots)):
        return
    widths = [stack.shape[-2] for stack in layer.lora_b_stacked]
    for number, name in enumerate(names):
        if (part := parts.get(name)) is None:
            continue
        (rank, inputs), (outputs, other) = part.lora_a.shape, part.lora_b.shape
        alone = len(names) == len(widths)  # else a matrix of the file is that of several slices
        fits = outputs == widths[number] if alone else outputs <= sum(widths)
        if rank != other or inputs != stacks[0].shape[-1] or not fits:
            raise ValueError(
                f"the adapter has matrices {rank} x {inputs} and {outputs} x {other} for {name}, which has "
                f"{stacks[0].shape[-1]} inputs and {widths[number] if alone else sum(widths)} outputs"
            )
