"""Memory for the tensors of an update: segments that a trainer shares with servers on its machine, and main memory that
one update leaves to the next.

A segment of main memory is a memfd. It has no file, so it is free once the last process that has it ends or lets it go:
nothing must be swept, and the size of /dev/shm does not bound it. It cannot shrink (its seals), so reading it never
ends a process. Servers open it under `/proc`, which the kernel allows to the same user. A segment of a GPU is shared by
CUDA's handle.

`KeptMemory` exists because the first use of a page costs more than all other work on its bytes: the kernel clears it,
and on a virtual machine the host may have to find it first (0.3 to 4 s per GiB, against 0.07 s for a page that is
there). Between two updates the pages are marked as free to take (`MADV_FREE`): the kernel takes them back when memory
is short, and until then they count as used by this process.

Needs torch alone, because vLLM's workers import this module too.
"""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from skyrl.weights.tensors import sent_as

NAME = "skyrl-weights"
ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SegmentError(Exception):
    """The segment cannot be opened here."""


class Segment:
    """The trainer's side. Raises OSError without memory for it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = size
        self.device = device
        self._descriptor: int | None = None
        if device.type == "cuda":
            self._flat = torch.empty(size, dtype=torch.uint8, device=device)
            return
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, size)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._flat = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def fill(
        self, tensors: Mapping[str, torch.Tensor], places: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        """Copy each tensor to its place, which is in bytes, floating-point ones as `dtype`. Returns when the values are
        there."""
        for tensor, begin in zip(tensors.values(), places, strict=True):
            if tensor.numel():
                kind = sent_as(tensor, dtype)
                of_tensor = self._flat[begin : begin + tensor.numel() * kind.itemsize].view(kind).view(tensor.shape)
                of_tensor.copy_(tensor)
        if self._flat.is_cuda:
            torch.cuda.synchronize(self._flat.device)

    def described(self) -> dict[str, Any]:
        """For `opened`, as JSON."""
        if self._descriptor is not None:
            inode = os.fstat(self._descriptor).st_ino
            return {"pid": os.getpid(), "descriptor": self._descriptor, "inode": inode, "bytes": self.bytes}
        shared = self._flat.untyped_storage()._share_cuda_()
        uuid = str(torch.cuda.get_device_properties(self._flat.device).uuid)
        return {"gpu": uuid, "handle": [_as_text(value) for value in shared[1:]], "bytes": self.bytes}

    def close(self) -> None:
        """The memory is free once the servers have let it go, too."""
        descriptor, self._descriptor = self._descriptor, None
        self._flat = torch.empty(0, dtype=torch.uint8)
        if descriptor is not None:
            os.close(descriptor)


def places_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> tuple[list[int], int]:
    """Where each tensor begins in a segment, floating-point ones as `dtype`, and the size of the segment. In bytes."""
    places, end = [], 0
    for tensor in tensors.values():
        places.append(end)
        end += -(-tensor.numel() * sent_as(tensor, dtype).itemsize // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


def opened(described: Mapping[str, Any]) -> torch.Tensor:
    """The bytes of another process's segment, uint8 [bytes], on the device where it is. Writing into main memory
    changes this process's copy alone. Raises SegmentError."""
    try:
        return _on_gpu(described) if "gpu" in described else _in_memory(described)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise SegmentError(
            f"the trainer's memory cannot be opened ({str(error) or type(error).__name__}): trainer and vLLM need one "
            "machine, one user and one namespace of processes"
        ) from error


def _in_memory(described: Mapping[str, Any]) -> torch.Tensor:
    path = f"/proc/{int(described['pid'])}/fd/{int(described['descriptor'])}"
    if (link := os.readlink(path)) != f"/memfd:{NAME} (deleted)":  # opening something else could wait for ever
        raise OSError(f"{path} is {link}")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (described["inode"], described["bytes"]):
            raise OSError(f"{path} is another segment")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"{path} may shrink")
        # A private mapping: torch has no tensors that cannot be written
        return torch.frombuffer(mmap.mmap(descriptor, found.st_size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _on_gpu(described: Mapping[str, Any]) -> torch.Tensor:
    devices = range(torch.cuda.device_count())
    index = next((one for one in devices if str(torch.cuda.get_device_properties(one).uuid) == described["gpu"]), None)
    if index is None:
        raise OSError(f"the GPU {described['gpu']} is not one of this process's")
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(index, *(_from_text(value) for value in described["handle"]))
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)[: described["bytes"]]


def _as_text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_text(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value


ARENA_BYTES = 256 * 2**20


def _references(arenas: Sequence[mmap.mmap]) -> list[int]:
    return [sys.getrefcount(arena) for arena in arenas]


_UNUSED = _references([mmap.mmap(-1, 1)])[0]
"""References to an arena without tensors. Versions of Python count differently."""


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
        in_use = [count > _UNUSED for count in _references(self._arenas)]
        for number, used in enumerate(in_use):
            self._filled[number] = len(self._arenas[number]) if used else 0
            if not used:
                with suppress(OSError):  # a kernel before 4.5: the pages stay this process's
                    self._arenas[number].madvise(mmap.MADV_FREE)
