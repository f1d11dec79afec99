"""Causal attention over packed rows, registered with transformers under the name "skyrl_segments".

Each attention group of each slice is padded and computed alone, so that a slice's result does not depend on other
slices. Keys and values of a shared prefix are read by every segment after it. Supports the variants of scaled_dot_product_attention, and sliding windows. Knows nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl.backends.torch_lora.packing import AttentionGroup, Prefix

NAME = "skyrl_segments"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def segments_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_groups: Sequence[AttentionGroup],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]; returns [1, rows, heads,
    head_dim].

    Each row belongs to one of `attention_groups`. Dropout is never applied. Raises ValueError for variants that would
    need another kernel (soft-capping, sinks, position biases).
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported")
    by_row = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    parts = [_attend(group, by_row, scaling, sliding_window) for group in attention_groups]
    if all(group.rows is None for group in attention_groups):
        in_order = sorted(range(len(parts)), key=lambda index: attention_groups[index].first)
        return torch.cat([parts[index] for index in in_order])[None], None
    rows = torch.cat([_rows(group, query.device) for group in attention_groups])
    output = torch.cat(parts)
    return output.new_empty(output.shape).index_copy(0, rows, output)[None], None


def _rows(group: AttentionGroup, device: torch.device) -> Tensor:
    if group.rows is not None:
        return group.rows
    return torch.arange(group.first, group.first + group.count * group.longest, device=device)


def _attend(
    group: AttentionGroup, by_row: tuple[Tensor, Tensor, Tensor], scaling: float | None, window: int | None
) -> Tensor:
    """The attention of one group, [tokens, heads, head_dim]. by_row: q, k and v, each [rows, heads, head_dim]."""
    query, key, value = by_row
    prefix = group.prefix
    if prefix is not None and window is not None:
        prefix = prefix.last(window - 1)
    mask = _mask(group.longest, 0 if prefix is None else prefix.length, window, query.device)
    output = torch.nn.functional.scaled_dot_product_attention(
        _grid(group, query).transpose(1, 2),
        _after(prefix, key, _grid(group, key)).transpose(1, 2),
        _after(prefix, value, _grid(group, value)).transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    output = output.transpose(1, 2).reshape(group.count * group.longest, query.shape[1], value.shape[-1])
    return output if group.cells is None else output.index_select(0, group.cells)


def _mask(length: int, before: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of `before` + `length` keys each of the last `length` rows attends to: bool [length, before + length].
    None: row i attends to the first i + 1 keys."""
    if before == 0 and (window is None or length <= window):
        return None
    places = torch.arange(before + length, device=device)
    distance = places[before:, None] - places
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _after(prefix: Prefix | None, states: Tensor, grid: Tensor) -> Tensor:
    """The rows of the prefix before those of each segment: [count, prefix + longest, heads, head_dim]."""
    if prefix is None:
        return grid
    if prefix.rows is None:
        before = states[prefix.first : prefix.first + prefix.length]
    else:
        before = states.index_select(0, prefix.rows)
    return torch.cat([before.expand(len(grid), *before.shape), grid], dim=1)


def _grid(group: AttentionGroup, states: Tensor) -> Tensor:
    """The group's rows as [count, longest, heads, head_dim], zeros after each segment's end."""
    cells = group.count * group.longest
    if group.rows is None or group.cells is None:
        grid = states[group.first : group.first + cells]
    else:
        chosen = states.index_select(0, group.rows)
        grid = states.new_zeros(cells, *states.shape[1:]).index_copy(0, group.cells, chosen)
    return grid.view(group.count, group.longest, *states.shape[1:])


AttentionInterface.register(NAME, segments_attention)
