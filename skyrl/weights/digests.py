"""SHA-256 digests of tensors. Two tensors have the same digest if name, dtype, shape and every bit are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch


def digest(name: str, tensor: torch.Tensor) -> str:
    """SHA-256 in hexadecimal over the name, the dtype ("float32"), the shape ("2,3") and the bytes in row-major order,
    each of the first three ended by a zero byte."""
    shape = ",".join(map(str, tensor.shape))
    hashed = hashlib.sha256(f"{name}\0{dtype_name(tensor.dtype)}\0{shape}\0".encode())
    if tensor.numel():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hashed.update(memoryview(cast(Any, raw.numpy())))  # without the GIL, so the engine goes on meanwhile
    return hashed.hexdigest()


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The digest of each tensor, by name."""
    return {name: digest(name, tensor) for name, tensor in tensors}


def checksum(digests: Mapping[str, str]) -> str:
    """One SHA-256 over the sorted lines "name digest": the order of the tensors does not matter."""
    lines = sorted(f"{name} {value}\n" for name, value in digests.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
