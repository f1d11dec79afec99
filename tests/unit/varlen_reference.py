"""A CPU kernel for the operations behind torch's `varlen_attn`, in plain torch, one sequence at a time.

torch has these operations on GPUs only. With this kernel everything around them runs on a CPU as it is: torch's
function, the checks of its arguments, and its two operations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import varlen

Window = tuple[int, int]


@functools.cache
def use_reference() -> None:
    """From now on this process computes with the reference on a CPU, where torch can only fail."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _each(
    query: Tensor, key: Tensor, queries: Tensor, keys: Tensor, most: tuple[int, int], window: Window
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each sequence its queries, its keys, and bool [queries, keys], whether a query sees a key. Checks what the
    kernel checks."""
    assert queries.dtype == keys.dtype == torch.int32
    of_queries, of_keys = queries.tolist(), keys.tolist()
    assert of_queries[0] == of_keys[0] == 0
    assert (of_queries[-1], of_keys[-1]) == (len(query), len(key))
    assert most == tuple(max(b - a for a, b in pairwise(ends)) for ends in (of_queries, of_keys))
    left, right = window
    for (first, end), (first_key, end_key) in zip(pairwise(of_queries), pairwise(of_keys), strict=True):
        count = end_key - first_key
        distance = torch.arange(count - (end - first), count)[:, None] - torch.arange(count)
        sees = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            sees &= distance <= left
        if right >= 0:
            sees &= -distance <= right
        yield slice(first, end), slice(first_key, end_key), sees


def _for_all_heads(states: Tensor, heads: int) -> Tensor:
    """[heads, rows, head_dim] in float32."""
    return states.repeat_interleave(heads // states.shape[1], dim=1).transpose(0, 1).float()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A query without keys gets 0, and the sum infinity, as FlashAttention-2's kernel writes it."""
    assert cu_seq_k is not None
    assert window_size is not None
    assert seqused_k is block_table is None
    assert query.shape[-1] == value.shape[-1]
    window = (window_size[0], window_size[1])
    assert is_causal == (window == (-1, 0))
    heads = query.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    sums = torch.full((heads, len(query)), torch.inf)
    for rows, keys, sees in _each(query, key, cu_seq_q, cu_seq_k, (max_q, max_k), window):
        if not sees.shape[1]:
            continue
        scores = query[rows].transpose(0, 1).float() @ _for_all_heads(key[keys], heads).transpose(1, 2) * factor
        scores = scores.masked_fill(~sees, -torch.inf)
        sums[:, rows] = scores.logsumexp(-1)
        weights = scores.softmax(-1)
        output[rows] = (weights @ _for_all_heads(value[keys], heads)).transpose(0, 1).to(output.dtype)
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2 (arXiv 2307.08691), algorithm 2: with the sums that it is given, whatever they are of."""
    assert window_size is not None
    assert is_causal == (window_size == [-1, 0])
    assert grad_out.stride(-1) == 1
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
    factor = head_dim**-0.5 if scale is None else scale
    of_query, of_key, of_value = (
        torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)
    )
    window = (window_size[0], window_size[1])
    for rows, keys, sees in _each(query, key, cu_seq_q, cu_seq_k, (max_q, max_k), window):
        queries, outputs, gradients = (each[rows].transpose(0, 1).float() for each in (query, out, grad_out))
        of_keys, of_values = (_for_all_heads(each[keys], heads) for each in (key, value))
        scores = (queries @ of_keys.transpose(1, 2) * factor).masked_fill(~sees, -torch.inf)
        weights = (scores - lse[:, rows, None]).exp()
        delta = (gradients * outputs).sum(-1, keepdim=True)
        of_scores = weights * (gradients @ of_values.transpose(1, 2) - delta) * factor
        of_query[rows] = (of_scores @ of_keys).transpose(0, 1).to(query.dtype)
        for found, of_heads in (
            (of_key, of_scores.transpose(1, 2) @ queries),
            (of_value, weights.transpose(1, 2) @ gradients),
        ):
            added = of_heads.unflatten(0, (kv_heads, -1)).sum(1)
            found[keys] = added.transpose(0, 1).to(found.dtype)
    return of_query, of_key, of_value
