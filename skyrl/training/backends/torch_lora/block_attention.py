"""Attention of some queries to some keys of the same sequence, in blocks, such that parts of the keys can come one
after the other.

The softmax goes on from part to part by the logarithm of its sum ("Ring Attention with Blockwise Transformers",
arXiv 2310.01889; the formulas of the backward are those of FlashAttention, arXiv 2205.14135). The scores of two blocks
are in memory at a time. Knows tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 16 * 2**20
"""Of the float32 scores of one block of queries and one of keys."""
LARGEST_BLOCK = 1024
_SMALLEST_BLOCK = 64


@dataclass(frozen=True)
class Scoring:
    """`scale` multiplies the scores; `window` and `softcap` as in `attention_kernels`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass
class Running:
    """What queries have made of the keys so far: `output` [heads, q, value_dim], and `sums` [heads, q], the logarithms
    of the softmax's sums; both float32."""

    output: Tensor
    sums: Tensor

    @staticmethod
    def begin(query: Tensor, value_dim: int, sinks: Tensor | None) -> Running:
        """Before the first key. query: [heads, q, head_dim]; sinks: [heads], scores without a value."""
        heads, rows, _ = query.shape
        output = query.new_zeros(heads, rows, value_dim, dtype=torch.float32)
        if sinks is None:  # not -inf, of which differences are not a number
            return Running(output, torch.full_like(output[..., 0], torch.finfo(torch.float32).min))
        return Running(output, sinks.float()[:, None].expand(heads, rows).clone())


def attend_to(running: Running, query: Tensor, key: Tensor, value: Tensor, distance: int, scoring: Scoring) -> None:
    """Add keys to what the queries have attended to, in place. query: [heads, q, head_dim], key [kv_heads, k,
    head_dim], value [kv_heads, k, value_dim]; the first query is `distance` tokens after the first key, or before it if
    that is negative. A query sees the keys up to itself."""
    kv_heads = len(key)
    for rows, columns in _blocks(len(query), query.shape[1], key.shape[1], distance, scoring.window):
        states = _grouped(query[:, rows], kv_heads)
        scores, _ = _scores(states, key[:, columns], scoring)
        scores = _masked(scores, rows, columns, distance, scoring.window)
        most = scores.amax(-1).clamp_(min=torch.finfo(torch.float32).min)  # -inf of a query that sees no key here
        weights = scores.sub_(most[..., None]).exp_()
        own_sums = most + weights.sum(-1).log()
        made = weights.to(value.dtype).flatten(1, 2) @ value[:, columns]
        sums = running.sums[:, rows]
        own_sums, most = own_sums.flatten(0, 1), most.flatten(0, 1)
        together = torch.logaddexp(sums, own_sums)
        output = running.output[:, rows]
        output.mul_((sums - together).exp_()[..., None])
        output.addcmul_(made.view(output.shape).float(), (most - together).exp_()[..., None])
        sums.copy_(together)


@dataclass(frozen=True)
class Attended:
    """Queries [heads, q, head_dim] that have attended to all their keys. sums: `Running.sums`. gradient: of their
    outputs [heads, q, value_dim]. delta: float32 [heads, q], the sum of each output times its gradient."""

    query: Tensor
    sums: Tensor
    gradient: Tensor
    delta: Tensor


def gradients_to(
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
    attended: Attended,
    key: Tensor,
    value: Tensor,
    distance: int,
    scoring: Scoring,
) -> None:
    """Add the gradients by way of these keys, in place, to float32 tensors like query, key and value. The keys are as
    in `attend_to`."""
    query = attended.query
    kv_heads = len(key)
    for rows, columns in _blocks(len(query), query.shape[1], key.shape[1], distance, scoring.window):
        states = _grouped(query[:, rows], kv_heads)
        keys, values = key[:, columns], value[:, columns]
        scores, slope = _scores(states, keys, scoring)
        scores = _masked(scores, rows, columns, distance, scoring.window)
        weights = scores.sub_(_by_kv_head(attended.sums[:, rows], kv_heads)[..., None]).exp_().flatten(1, 2)
        of_output = _grouped(attended.gradient[:, rows], kv_heads).to(value.dtype)
        of_value[:, columns] += weights.to(value.dtype).transpose(1, 2) @ of_output
        of_scores = (of_output @ values.transpose(1, 2)).float()
        of_scores = of_scores.sub_(_by_kv_head(attended.delta[:, rows], kv_heads).flatten(1, 2)[..., None]).mul_(
            weights
        )
        if slope is not None:
            of_scores.mul_(slope)
        of_scores = of_scores.mul_(scoring.scale).to(query.dtype)
        of_query[:, rows] += (of_scores @ keys).view(len(query), -1, query.shape[2])
        of_key[:, columns] += of_scores.transpose(1, 2) @ states


def _blocks(heads: int, rows: int, columns: int, distance: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries and keys of which some query sees some key."""
    size = LARGEST_BLOCK
    while size > _SMALLEST_BLOCK and 4 * heads * size * size > BLOCK_BYTES:
        size //= 2
    for row in range(0, rows, size):
        last_row = min(row + size, rows)
        for column in range((columns - 1) // size * size, -1, -size):
            last_column = min(column + size, columns)
            if column > last_row - 1 + distance:
                continue
            if window is not None and row + distance - (last_column - 1) >= window:
                break
            yield slice(row, last_row), slice(column, last_column)


def _grouped(states: Tensor, kv_heads: int) -> Tensor:
    """[heads, q, dim] as [kv_heads, heads / kv_heads * q, dim]: the queries that read one head of keys."""
    heads, rows, dim = states.shape
    return states.reshape(kv_heads, heads // kv_heads * rows, dim)


def _by_kv_head(numbers: Tensor, kv_heads: int) -> Tensor:
    """[heads, q] as [kv_heads, heads / kv_heads, q]."""
    return numbers.reshape(kv_heads, -1, numbers.shape[-1])


def _scores(states: Tensor, keys: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """float32 [kv_heads, grouped queries, k], and with soft-capping its derivative."""
    scores = (states @ keys.transpose(1, 2)).float().mul_(scoring.scale)
    if scoring.softcap is None:
        return scores, None
    capped = scores.div_(scoring.softcap).tanh_()
    slope = 1 - capped * capped
    return capped.mul_(scoring.softcap), slope


def _masked(scores: Tensor, rows: slice, columns: slice, distance: int, window: int | None) -> Tensor:
    """[kv_heads, grouped queries, k] as [kv_heads, heads / kv_heads, q, k], -inf where a query does not see a key."""
    count = rows.stop - rows.start
    scores = scores.view(len(scores), -1, count, scores.shape[-1])
    first, last = rows.start + distance, rows.stop - 1 + distance
    seen = columns.stop - 1 <= first and (window is None or last - columns.start < window)
    if seen:
        return scores
    places = torch.arange(first, last + 1, device=scores.device)[:, None]
    apart = places - torch.arange(columns.start, columns.stop, device=scores.device)
    unseen = apart < 0 if window is None else (apart < 0) | (apart >= window)
    return scores.masked_fill_(unseen, float("-inf"))
