"""The device that a backend computes on: chooses it, tells a lack of memory from a broken device, and copies to and
from it.

Each copy costs the host a call, and many arrays go in one copy. A copy from or to memory that is not pinned waits until
the device has finished all its work: so copies here use pinned memory. Of copies only `HostCopy.read` waits, for what
it copies.
Knows nothing of models, adapters or passes.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.protocol import DeviceFault, OutOfMemory

_MEMORY_WORDS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Texts of torch's plain RuntimeError when the CPU's allocator, cuBLAS or cuDNN finds no memory."""
SHAPES_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "16"}
"""For how many shapes of products on a CPU oneDNN keeps code, at most 140 MiB, and torch buffers; both read this at the
first product. By default both keep 1,024, which come to gigabytes where each batch has other shapes."""
HOST = torch.device("cpu")
"""What the engine's own work needs where ranks compute."""


def prepare_device(threads: int) -> torch.device:
    """CUDA if available, else the CPU with `threads` threads.

    On CUDA, operations that have a deterministic kernel use it: sums into rows by index, and cuBLAS. So a command that
    runs again differs less from its first run. Nothing relies on it: with `warn_only` torch only warns where it has no
    such kernel, and the backward of its fused attention adds in the order in which blocks come.
    """
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # else deterministic mode fills each new tensor with NaN before a kernel writes it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # On Hopper and newer GPUs torch prefers cuDNN's attention, which makes a plan for each new shape on the host
        # (others report 23 to 37 ms) and keeps it. With shared prompts each step has 11 to 38 shapes of its own.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return torch.device("cuda")
    for name, count in SHAPES_KEPT.items():
        os.environ.setdefault(name, count)
    torch.set_num_threads(threads)
    return torch.device("cpu")


def base_dtype(device: torch.device) -> torch.dtype:
    """The base model's dtype on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


ALIGNMENT = 64
"""Bytes to which torch aligns the tensors that it allocates."""


def align(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Copy the parameters that lie elsewhere, as those may that come from a file without a copy. On processors without
    AVX-512 the last bits of a product depend on where its matrices begin."""
    for parameter in parameters:
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def synchronize(device: torch.device) -> None:
    """Wait for all started work of the device; returns at once on a CPU. Raises the error of a failed kernel."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def failure_of(error: Exception, device: torch.device) -> Exception:
    """The failure of a command that raised `error`: OutOfMemory if memory was short, else `error` itself.

    Clears the local variables of the frames in the traceback, and so frees the tensors of a failed pass. Raises
    DeviceFault when the device does not answer any more.
    """
    traceback.clear_frames(error.__traceback__)
    _check(device, error)
    if not _is_lack_of_memory(error):
        return error
    failure = OutOfMemory(str(error))
    failure.__cause__ = error
    return failure


@contextlib.contextmanager
def command_on(device: torch.device, *, waits: bool) -> Iterator[None]:
    """The work of one command. Raises OutOfMemory or DeviceFault in place of torch's errors.

    With `waits` the command ends when the device has finished its work. Otherwise a kernel that fails later would fail
    the next command.
    """
    try:
        yield
    except Exception as error:  # raised again, by the device's name for it
        failure = failure_of(error, device)
        if failure is error:
            raise
        raise failure from error
    if waits:
        _check(device, None)


def _check(device: torch.device, error: Exception | None) -> None:
    try:
        synchronize(device)
    except Exception as fault:  # of CUDA's many kinds
        raise DeviceFault(f"{device} cannot be used any more: {fault}") from (error or fault)


def _is_lack_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_WORDS)


def has_own_memory(device: torch.device) -> bool:
    """Whether what the host has made must be copied to the device."""
    return device.type != "cpu"


def uploaded(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in their shapes, as `moved`. On a CPU a tensor has its array's memory."""
    return moved([torch.from_numpy(np.ascontiguousarray(array)) for array in arrays], device)


T = TypeVar("T")


def moved(things: Sequence[T], device: torch.device) -> list[T]:
    """Tensors of the host on the device, in their shapes, or dataclasses with such tensors: those in their fields, in
    tuples there, and in dataclasses there. All go in one copy, share one buffer, and the host does not wait. On a CPU
    they stay where they are."""
    if not has_own_memory(device):
        return list(things)
    found: list[Tensor] = []
    for thing in things:
        _replaced(thing, found.append)
    placed = iter(_copied(found, device))
    return [_replaced(thing, lambda tensor: next(placed)) for thing in things]


def _replaced(thing: Any, action: Callable[[Tensor], Tensor | None]) -> Any:
    """The thing with the results of `action` in the places of its tensors, in their order."""
    if isinstance(thing, Tensor):
        return action(thing)
    if isinstance(thing, tuple) and thing and isinstance(thing[0], Tensor):
        return tuple(map(action, thing))
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    given = {each.name: getattr(thing, each.name) for each in fields(thing)}
    made = {name: _replaced(value, action) for name, value in given.items()}
    return replace(thing, **{name: value for name, value in made.items() if value is not given[name]})


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    of_host = host.numpy()
    for tensor, start in zip(tensors, starts, strict=False):
        if tensor.nbytes:
            of_host[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    on_device = host.to(device, non_blocking=True)
    return [
        on_device[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=False)
    ]


class HostCopy:
    """Numbers on their way to the host, all in one copy that is made as soon as the device has computed them.

    numbers: float64 [n] each; logprobs: float32 [n] each. What the device starts later does not delay the copy.
    """

    def __init__(self, numbers: Sequence[Tensor], logprobs: Sequence[Tensor]) -> None:
        words = [tensor.detach().view(torch.int32) for tensor in (*numbers, *logprobs)]
        # float64 comes first, so that each array begins at a multiple of its width
        self._doubles = len(numbers)
        self._ends = [*accumulate(map(len, words))]
        self._arrived: torch.cuda.Event | None = None
        self._host = torch.cat(words)
        if self._host.is_cuda:
            pinned = torch.empty(self._host.shape, dtype=torch.int32, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> tuple[list[npt.NDArray[np.float64]], list[npt.NDArray[np.float32]]]:
        """The arrays. Waits until the copy has arrived, and raises the error of a kernel that has failed before."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found = np.split(self._host.numpy(), self._ends[:-1])
        doubles, singles = found[: self._doubles], found[self._doubles :]
        return [each.view(np.float64) for each in doubles], [each.view(np.float32) for each in singles]
