"""A trainer's tensors as parts of an update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

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
