"""The device that a backend computes on: choosing it, and telling a lack of memory from a device that is broken.

Knows torch. Deliberately knows nothing of models, adapters or passes.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

import torch

from skyrl.backends.base import DeviceFault, OutOfMemory

_MEMORY_WORDS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What torch says, in a plain RuntimeError, when the CPU's allocator, cuBLAS or cuDNN finds no memory."""


def prepare_device(threads: int) -> torch.device:
    """CUDA when there is one, else the CPU with `threads` threads.

    On CUDA kernels are deterministic where torch has such a kernel; it warns where it has none.
    """
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        return torch.device("cuda")
    torch.set_num_threads(threads)
    return torch.device("cpu")


def base_dtype(device: torch.device) -> torch.dtype:
    """The base model's dtype on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that was started on it; a CPU has nothing to wait for. Raises the error
    of a kernel that has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def failure_of(error: Exception, device: torch.device) -> Exception:
    """The failure of a command that raised `error`: OutOfMemory if memory was short, else `error` itself.

    Clears the local variables of the frames that raised, and so frees the tensors that a failed pass held. Raises
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
    """The work of one command, which may raise OutOfMemory or DeviceFault in place of torch's errors.

    With `waits` the command ends when the device has done all of it. A kernel that fails later would be held against
    the next command.
    """
    try:
        yield
    except Exception as error:
        failure = failure_of(error, device)
        if failure is error:
            raise
        raise failure from error
    if waits:
        _check(device, None)


def _check(device: torch.device, error: Exception | None) -> None:
    try:
        synchronize(device)
    except Exception as fault:
        raise DeviceFault(f"{device} cannot be used any more: {fault}") from (error or fault)


def _is_lack_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_WORDS)
