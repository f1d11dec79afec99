"""Causal attention over packed rows, registered with transformers under the name "skyrl_segments".

Each attention group of each slice is padded and computed alone, so that a slice's result does not depend on other
slices. Supports sliding windows, soft-capping and sinks (`attention_kernels`). Knows nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl.backends.torch_lora.attention_kernels import attend
from skyrl.backends.torch_lora.packing import AttentionGroup

NAME = "skyrl_segments"
_UNSUPPORTED = ("position_bias",)


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]; returns [1, rows, heads,
    head_dim].

    Each row belongs to one of `attention_groups`. `s_aux`: the heads' sinks [heads]. Dropout is never applied. Raises
    ValueError for position biases, which would need another kernel.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported")
    by_row = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    parts = [_attend(group, by_row, scaling, sliding_window, softcap, s_aux) for group in attention_groups]
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
    group: AttentionGroup,
    by_row: tuple[Tensor, Tensor, Tensor],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention of one group, [tokens, heads, head_dim]. by_row: q, k and v, each [rows, heads, head_dim]."""
    query, key, value = by_row
    length = group.longest
    mask = None
    if window is not None and length > window:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < window)
    output = attend(
        _grid(group, query),
        _grid(group, key),
        _grid(group, value),
        mask=mask,
        causal=mask is None,
        scale=scaling,
        softcap=softcap,
        sinks=sinks,
    )
    output = output.transpose(1, 2).reshape(group.count * length, query.shape[1], value.shape[-1])
    return output if group.cells is None else output.index_select(0, group.cells)


def _grid(group: AttentionGroup, states: Tensor) -> Tensor:
    """The group's rows as [count, heads, longest, head_dim], zeros after each sequence's end."""
    cells = group.count * group.longest
    if group.rows is None or group.cells is None:
        grid = states[group.first : group.first + cells]
    else:
        chosen = states.index_select(0, group.rows)
        grid = states.new_zeros(cells, *states.shape[1:]).index_copy(0, group.cells, chosen)
    return grid.view(group.count, group.longest, *states.shape[1:]).transpose(1, 2)


AttentionInterface.register(NAME, segments_attention)
