"""Main memory for the tensors of an update that the next one uses again. Needs torch alone, because vLLM's workers
import it too.

The first use of a page costs more than all other work on its bytes: the kernel clears it, and on a virtual machine the
host may have to find it first (0.3 to 4 s per GiB, against 0.07 s for a page that is there). Between two updates the
pages are marked as free to take (`MADV_FREE`): the kernel takes them back when memory is short, and until then they
count as used by this process.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

ARENA_BYTES = 256 * 2**20
ALIGNMENT = 64
_UNUSED = 3
"""References to an arena without tensors: the list, the loop's variable, and the argument of `getrefcount`."""


class KeptMemory:
    """Arenas that are filled one after the other. Tensors keep their arena alive, so memory is never used again under a
    tensor that somebody still has. Not safe for several threads at once."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self._arena_bytes = arena_bytes
        self._arenas: list[mmap.mmap] = []
        self._filled: list[int] = []
        """Bytes taken of each arena, from its beginning on."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with any values. Raises OSError without memory for it."""
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        number = self._arena_with(count * dtype.itemsize)
        begin = self._filled[number]
        self._filled[number] = begin + -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        flat = torch.frombuffer(self._arenas[number], dtype=torch.uint8, count=count * dtype.itemsize, offset=begin)
        return flat.view(dtype).view(tuple(shape))

    def _arena_with(self, size: int) -> int:
        """The number of an arena with room for so many bytes: of those the fullest, so that a large tensor finds the
        arena that was made for it also when tensors come in another order."""
        rooms = {number: len(self._arenas[number]) - filled for number, filled in enumerate(self._filled)}
        fitting = [number for number, room in rooms.items() if room >= size]
        if fitting:
            return min(fitting, key=rooms.__getitem__)
        arena = mmap.mmap(-1, max(size, self._arena_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._arenas.append(arena)
        self._filled.append(0)
        return len(self._arenas) - 1

    def reuse(self) -> None:
        """Begin again with all arenas, but for those with tensors that somebody still has: they wait for a later
        call."""
        in_use = [sys.getrefcount(arena) > _UNUSED for arena in self._arenas]
        for number, used in enumerate(in_use):
            self._filled[number] = len(self._arenas[number]) if used else 0
            if not used:
                with suppress(OSError):  # a kernel before 4.5: the pages stay this process's
                    self._arenas[number].madvise(mmap.MADV_FREE)
