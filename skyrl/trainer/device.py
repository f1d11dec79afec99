"""The device that a backend computes on: chooses it, tells a lack of memory from a broken device, and copies to and
from it.

Each copy costs the host a call, and each copy to the host waits until the device has computed what it copies: so many
arrays go in one copy. Knows nothing of models, adapters or passes.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.protocol import DeviceFault, OutOfMemory

_MEMORY_WORDS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Texts of torch's plain RuntimeError when the CPU's allocator, cuBLAS or cuDNN finds no memory."""
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


def uploaded(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in shape [elements], from one copy. They share one buffer."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    starts = [0, *accumulate(sizes)]
    # From pinned memory the copy does not wait for what the device computes
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    of_host = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        of_host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = host.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, starts, strict=False)
    ]


def read_back(
    numbers: Sequence[Tensor], logprobs: Sequence[Tensor]
) -> tuple[list[npt.NDArray[np.float64]], list[npt.NDArray[np.float32]]]:
    """Copies on the host. numbers: float64 [n] each; logprobs: float32 [n] each. Waits for the device once."""
    words = [tensor.detach().view(torch.int32) for tensor in (*numbers, *logprobs)]
    found = iter(np.split(torch.cat(words).cpu().numpy(), [*accumulate(map(len, words))][:-1]))
    # float64 comes first, so that each array begins at a multiple of its width
    return [next(found).view(np.float64) for _ in numbers], [next(found).view(np.float32) for _ in logprobs]
