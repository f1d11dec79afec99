"""Less memory for a vLLM on a CPU that has done little yet: slots of adapters and the key-value cache take what is
written into them, and what loading has freed goes back to the kernel.

vLLM makes slots and cache with `torch.zeros`, which writes zeros into all of them: Qwen2.5-0.5B at a context of 4,096
took 0.7 GB for eight slots and 1.1 GB for its cache before the first request. Pages of a new mapping are zeros, too,
and exist from their first write on. So the slots of adapters that nobody loads take nothing, and the cache as much as
was ever used.

Knows where vLLM makes both, and glibc. Knows nothing of adapters or blocks.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

LEAST_BYTES = 2**16
"""Smaller tensors are left to torch."""


def take_what_is_used() -> None:
    """Patch this process. A second call changes nothing."""
    if "load_lora_model" in vars(CPUModelRunner):
        return
    for name in ("load_model", "initialize_kv_cache"):
        setattr(CPUModelRunner, name, _then_trimmed(getattr(CPUModelRunner, name)))
    for name in ("load_lora_model", "initialize_kv_cache"):
        setattr(CPUModelRunner, name, _inside(getattr(CPUModelRunner, name)))


def trim() -> None:
    """Give what was freed back to the kernel. Without glibc nothing happens."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def _then_trimmed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        trim()
        return result

    return patched


def _inside(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(runner: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        with UntouchedZeros():
            return original(runner, *args, **kwargs)

    return patched


class UntouchedZeros(TorchFunctionMode):
    """Inside, large `torch.zeros` for a CPU are mappings that nobody has written to."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.zeros and given.keys() == {"dtype", "device"} and torch.device(given["device"]).type == "cpu":
            shape = args if isinstance(args[0], int) else args[0]
            size = math.prod(shape) * given["dtype"].itemsize
            if size >= LEAST_BYTES:
                return untouched(size, given["dtype"]).view(shape)
        return func(*args, **given)


_MAPPINGS: set[int] = set()
"""Addresses of the storages of `untouched`, which live as long as the process."""
_DONTNEED = 4
"""Of madvise: pages of a private mapping are zeros again, and take no memory."""


def forget(slot: torch.Tensor) -> None:
    """Give back the whole pages of a part of a tensor of `untouched`. They are zeros afterwards; nobody may rely on the
    numbers of the pages that the part shares with others. Other tensors stay as they are."""
    if slot.untyped_storage().data_ptr() in _MAPPINGS and slot.is_contiguous():
        start = -(-slot.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (slot.data_ptr() + slot.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)


def untouched(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of `size` bytes in a mapping of their own, which ends with the tensor: [elements]."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made = torch.frombuffer(pages, dtype=dtype)
    _MAPPINGS.add(made.data_ptr())
    return made
