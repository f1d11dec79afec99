"""A trainer's tensors as parts of an update: in buckets, with the dtypes in which tensors travel, and SHA-256 digests.

Two tensors have the same digest if name, dtype, shape and every bit are the same. Imports torch alone: vLLM's workers
import this module too.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

BUCKET_BYTES = 512 * 2**20
Part = dict[str, torch.Tensor]
"""Tensors by the names of the model's checkpoint."""


def sent_as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent: `dtype` if that is given and the tensor's is a floating-point one too."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def in_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None, most_bytes: int = BUCKET_BYTES
) -> Iterator[Part]:
    """Parts of at most `most_bytes`, or of one tensor. Floating-point tensors are cast to `dtype` if it is given, into
    new memory, whose first use takes longer than the cast: give `TrainerGroup` and `SharedMemory` the dtype instead. A
    tensor that shares its memory with an earlier one is left out: a tied head is the embedding."""
    bucket: Part = {}
    size, seen = 0, dict[tuple[object, ...], weakref.ref[torch.UntypedStorage]]()
    for name, tensor in tensors:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        earlier = seen.get(place)
        # Memory of a tensor that is gone may have been used again, for another tensor of the same shape
        if tensor.numel() and earlier is not None and earlier() is not None:
            continue
        seen[place] = weakref.ref(tensor.untyped_storage())
        sent = tensor.detach().to(sent_as(tensor, dtype)).contiguous()
        if bucket and size + sent.nbytes > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = sent
        size += sent.nbytes
    if bucket:
        yield bucket


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


def described(part: Mapping[str, torch.Tensor], dtype: torch.dtype | None, *, checksums: bool) -> dict[str, Any]:
    """The fields of a request about tensors that are sent as `dtype`, with their digests if `checksums`."""
    fields: dict[str, Any] = {
        "names": list(part),
        "dtypes": [dtype_name(sent_as(tensor, dtype)) for tensor in part.values()],
        "shapes": [list(tensor.shape) for tensor in part.values()],
    }
    if checksums:
        fields["checksums"] = digests((name, tensor.to(sent_as(tensor, dtype))) for name, tensor in part.items())
    return fields


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)
"""No model is updated in these. A trainer's own broadcast carries them, so they are received before they are
refused."""


NAMED = {dtype_name(dtype): dtype for dtype in FLOATS + INTEGERS + COMPLEX}


def check_sent(part: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a tensor of a dtype that servers do not take. Call it before anything of the part is
    announced: a group in which an announced tensor does not come cannot be used again."""
    for name, tensor in part.items():
        if tensor.dtype not in FLOATS + INTEGERS:
            raise ValueError(f"{name} is {dtype_name(tensor.dtype)}, which servers do not take: cast it before")
