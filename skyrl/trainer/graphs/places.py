"""Memory at fixed places: a graph reads and writes the same addresses in each replay.

`RowPlaces` holds tensors with rows, which all classes of rows share: a class uses the first rows of each. `Copies`
holds tensors without rows, such as adapters' matrices, which are copied there for each micro-batch. Knows tensors.
Knows nothing of graphs, or of what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Place:
    """`memory` [capacity, ...]. `of`: whose it is. `zero_from`: all rows from this one on are zeros. `written`: in
    which micro-batch all rows of its class were written."""

    memory: Tensor
    of: Hashable
    zero_from: int = 0
    written: int = -1


class RowPlaces:
    """Places for `capacity` rows each, on one device."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        self.capacity = capacity
        self._places: dict[Hashable, Place] = {}
        self._at: dict[int, Place] = {}
        self.held_bytes = 0

    def take(self, of: Hashable, index: int, like: Tensor) -> Place:
        """The place with number `index` of its owner, for rows [rows, ...] of the shape and dtype of `like`. It is made
        at the first call."""
        key = of, index, like.shape[1:], like.dtype
        if (place := self._places.get(key)) is None:
            memory = torch.zeros(self.capacity, *like.shape[1:], dtype=like.dtype, device=self._device)
            place = self._places[key] = Place(memory, of)
            self._at[memory.data_ptr()] = place
            self.held_bytes += memory.nbytes
        return place

    def at(self, rows: Tensor) -> Place | None:
        """The place whose first rows these are."""
        place = self._at.get(rows.data_ptr())
        if place is None or place.memory.shape[1:] != rows.shape[1:] or place.memory.dtype != rows.dtype:
            return None
        return place if rows.is_contiguous() else None

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of the places."""
        return tensor.untyped_storage().data_ptr() in self._at


def fill(place: Place, rows: Tensor, size: int) -> None:
    """Copy rows [R, ...] into the place. The rows after them, up to `size`, become zeros."""
    count = len(rows)
    place.memory[:count].copy_(rows)
    if count < min(size, place.zero_from):
        place.memory[count:size].zero_()
    if place.zero_from <= size:
        place.zero_from = count


class Copies:
    """Tensors that lie where their first values were put: copied storage by storage, so that an adapter whose matrices
    are views of one buffer is one copy. `held_bytes`: of all storages."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: whose storages consist of such tensors alone."""
        sources = _storages(tensors)
        self._copies = {address: torch.empty_like(source) for address, source in sources.items()}
        self._order = list(sources)
        self.held_bytes = sum(copy.nbytes for copy in self._copies.values())
        self.tensors = [
            self._copies[each.untyped_storage().data_ptr()].as_strided(each.shape, each.stride(), each.storage_offset())
            for each in tensors
        ]

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors with the `layout` of the first ones."""
        sources = list(_storages(tensors).values())
        if sources:
            torch._foreach_copy_([self._copies[address] for address in self._order], sources)  # type: ignore[attr-defined]


def layout(tensors: Sequence[Tensor]) -> Hashable:
    """What two sequences of tensors must have in common to lie at the same places: shapes, dtypes, and how they lie in
    storages."""
    numbers: dict[int, int] = {}
    found: list[Hashable] = []
    for each in tensors:
        storage = each.untyped_storage()
        number = numbers.setdefault(storage.data_ptr(), len(numbers))
        found.append((each.shape, each.stride(), each.storage_offset(), each.dtype, number, storage.nbytes()))
    return tuple(found)


def _storages(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Each distinct storage, flat, by address, in the order of its first tensor."""
    found: dict[int, Tensor] = {}
    for each in tensors:
        storage = each.untyped_storage()
        if storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=each.dtype, device=each.device).set_(storage)
    return found
