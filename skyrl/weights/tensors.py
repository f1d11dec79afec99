"""A trainer's tensors as parts of an update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch

BUCKET_BYTES = 512 * 2**20
Part = dict[str, torch.Tensor]
"""Tensors by the names of the model's checkpoint."""


def in_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None, most_bytes: int = BUCKET_BYTES
) -> Iterator[Part]:
    """Parts of at most `most_bytes`, or of one tensor. Floating-point tensors are cast to `dtype` if it is given. A
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
        sent = tensor.detach()
        if dtype is not None and sent.is_floating_point():
            sent = sent.to(dtype)
        sent = sent.contiguous()
        if bucket and size + sent.nbytes > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = sent
        size += sent.nbytes
    if bucket:
        yield bucket
