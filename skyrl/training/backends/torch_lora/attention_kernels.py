"""Attention of one grid of sequences: torch's kernel, or exact formulas for soft-capping and sinks.

Knows tensors alone. Knows nothing of packed rows, models or adapters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORES_BYTES = 64 * 2**20
"""Size of one block of float32 scores. With soft-capping or sinks, backward needs the memory of a few blocks."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [count, heads, q, head_dim], key [count, kv_heads, k, head_dim] and value [count, kv_heads, k, value_dim]
    of one dtype; returns [count, heads, q, value_dim] in that dtype. `heads` is a multiple of `kv_heads`.

    mask: bool [q, k] or [count, 1, q, k], True where a query sees a key; without softcap and sinks also numbers of
    query's dtype, which are added to the scores. None: each query sees every key. With `causal` there is no mask, q
    equals k, and query i sees the keys 0 to i. `scale` (default: head_dim^-0.5) multiplies the scores. A query that
    sees no key gets a finite result without meaning.

    softcap: the scores become softcap * tanh(scores / softcap) before the mask (Gemma 2, arXiv 2408.00118, section 2).
    sinks: [heads], one more score per head that takes part in the softmax and has no value (gpt-oss, arXiv 2508.10925,
    section 2.3). Without both, torch's scaled_dot_product_attention computes the result. With one of them the scores
    are made in blocks of queries, the softmax in float32; with gradients and more than one block, backward computes
    each block again.
    """
    assert not (causal and mask is not None)
    if softcap is None and sinks is None:
        if mask is not None and wants_all_heads(query.device):
            key, value = for_all_heads(key, query.shape[1]), for_all_heads(value, query.shape[1])
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    count, heads, rows, _ = query.shape
    length = key.shape[2]
    step = max(1, SCORES_BYTES // (4 * count * heads * length))
    parts = []
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        seen = stop if causal else length
        block = _causal_mask(start, stop, query.device) if causal else mask
        if mask is not None:
            block = mask[..., start:stop, :]
        arguments = (query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], block, factor, softcap, sinks)
        if rows > step and torch.is_grad_enabled():
            parts.append(checkpoint(_explicit, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_explicit(*arguments))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def wants_all_heads(device: torch.device) -> bool:
    """Whether masked attention is given keys and values of every head: see `for_all_heads`."""
    return device.type == "cuda"


def for_all_heads(states: Tensor, heads: int) -> Tensor:
    """Keys or values [count, kv_heads, ...] as [count, heads, ...]: each head a copy of the one that it reads.

    With a mask and fewer heads of keys and values, torch has on CUDA only kernels that keep all scores in memory. With
    as many heads it has one that does not (PyTorch's scaled_dot_product_attention, "memory-efficient attention"). The
    copies need less memory than the scores."""
    return states if states.shape[1] == heads else states.repeat_interleave(heads // states.shape[1], dim=1)


def _causal_mask(start: int, stop: int, device: torch.device) -> Tensor:
    """Queries [start, stop) of a causal grid over the keys [0, stop)."""
    return torch.arange(start, stop, device=device)[:, None] >= torch.arange(stop, device=device)[None, :]


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(softcap(scale * query key^T)) value, where the sinks add their exponentials to the softmax's sum."""
    count, heads, rows, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = query.reshape(count, kv_heads, heads // kv_heads * rows, head_dim)
    scores = (grouped @ key.transpose(2, 3)).view(count, heads, rows, length) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(count, heads, rows, 1)
        scores = torch.cat([scores, column], dim=3)
    weights = scores.softmax(dim=3)[..., :length].to(value.dtype)
    output = weights.reshape(count, kv_heads, heads // kv_heads * rows, length) @ value
    return output.view(count, heads, rows, value.shape[-1])
