"""Causal attention over packed rows, registered with transformers under the name "skyrl_segments".

Each attention group of each slice is padded and computed alone, so that a slice's result does not depend on other
slices. Every segment reads the keys and values of the prefix that it continues. Supports sliding windows, soft-capping
and sinks (`attention_kernels`). Knows nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl.training.backends.torch_lora.attention_kernels import attend
from skyrl.training.backends.torch_lora.block_attention import Scoring
from skyrl.training.backends.torch_lora.divided_attention import divided_attention
from skyrl.training.backends.torch_lora.packing import AttentionGroup
from skyrl.training.backends.torch_lora.segments import bundled
from skyrl.training.backends.torch_lora.sequence_part import SequencePart

NAME = "skyrl_segments"
_UNSUPPORTED = ("position_bias",)
KEPT_MASK_BYTES = 16 * 2**20
"""A mask of at most these bytes, one for each query and key, is made once for all layers, not by up to ten small
operations in each. All masks of 3,800 rows, 4 groups of 16 samples behind prompts of 512 tokens, have 0.9 MB together.
Only sequences of more than 4,096 tokens, with a sliding window or behind a prompt, have larger ones."""


def segments_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_groups: Sequence[Sequence[AttentionGroup]] | SequencePart | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]; returns [1, rows, heads,
    head_dim].

    `attention_groups`: of each slice, which cover the rows in order; or the rows are this rank's part of one sequence.
    `s_aux`: the heads' sinks [heads]. Dropout is
    never applied. Raises ValueError for position biases, which would need another kernel, and without groups.
    """
    if attention_groups is None:
        raise ValueError("the model does not pass the layout of the rows on to its attention")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported")
    if isinstance(attention_groups, SequencePart):
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
        made = divided_attention(query[0], key[0], value[0], attention_groups, scoring, s_aux)
        return made.transpose(0, 1)[None], None
    kernel = partial(attend, scale=scaling, softcap=softcap, sinks=s_aux)
    # Cut into pieces once: backward then puts their gradients together once, in place of a sum over all rows for each
    sizes = [size for groups in attention_groups for group in groups for size in group.pieces]
    pieces = [states[0].transpose(0, 1).split(sizes) for states in (query, key, value)]
    outputs: list[Tensor] = []
    start = 0
    for groups in attention_groups:
        count = sum(len(group.pieces) for group in groups)
        outputs += _attend_slice(groups, [states[start : start + count] for states in pieces], kernel, sliding_window)
        start += count
    return torch.cat(outputs)[None], None


def _attend_slice(
    groups: Sequence[AttentionGroup],
    pieces: Sequence[Sequence[Tensor]],
    kernel: Callable[..., Tensor],
    window: int | None,
) -> Iterator[Tensor]:
    """The attention of each group, [rows, heads, head_dim]. pieces: of the slice's q, k and v, each [rows, heads,
    head_dim]. kernel: `attend` with the layer's scale, soft-capping and sinks."""
    start = 0
    for group in groups:
        stop = start + len(group.pieces)
        query, key, value = (_grid(group, states[start:stop]) for states in pieces)
        before = sum(len(pieces[1][number]) for number in group.prefix)
        if window is not None:
            before = min(before, window - 1)
        together = 1
        if before:
            together = bundled(group.count, group.longest, before)
            query, key, value = (_in_bundles(grid, together) for grid in (query, key, value))
            key, value = (
                _after([states[number] for number in group.prefix], before, grid)
                for states, grid in zip(pieces[1:], (key, value), strict=True)
            )
        mask = _kept_mask(group, together, before, window, query.device)
        output = kernel(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask=mask, causal=mask is None
        )
        output = output.transpose(1, 2).flatten(0, 1)[: group.count * group.longest]
        yield output if group.cells is None else output.index_select(0, group.cells)
        start = stop


def _in_bundles(grid: Tensor, together: int) -> Tensor:
    """[count, longest, ...] as [bundles, together * longest, ...]. The last bundle is filled up with zeros."""
    lacking = -len(grid) % together
    if lacking:
        grid = torch.cat([grid, grid.new_zeros(lacking, *grid.shape[1:])])
    return grid.view(len(grid) // together, together * grid.shape[1], *grid.shape[2:])


def _kept_mask(
    group: AttentionGroup, together: int, before: int, window: int | None, device: torch.device
) -> Tensor | None:
    """The group's mask for this window. The first layer makes it for those after it, unless it is large."""
    if window in group.masks:
        return group.masks[window]
    mask = _mask(group.longest, together, before, window, device)
    if mask is None or mask.nbytes <= KEPT_MASK_BYTES:
        group.masks[window] = mask
    return mask


def _mask(length: int, together: int, before: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each row of a bundle attends to: bool [together * length, before + together * length]. Those of
    the prefix, and those of its own segment up to itself. None: row i attends to the first i + 1 keys."""
    if before == 0 and (window is None or length <= window):
        return None
    places = torch.arange(before + length, device=device)
    distance = places[before:, None] - places
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if together == 1:
        return mask
    own = torch.block_diag(*[mask[:, before:]] * together)
    return torch.cat([mask[:, :before].repeat(together, 1), own], dim=1)


def _after(prefix: Sequence[Tensor], count: int, grid: Tensor) -> Tensor:
    """The last `count` rows of the prefix before those of each bundle: [bundles, count + rows, heads, head_dim]."""
    rows = torch.cat(list(prefix)) if len(prefix) > 1 else prefix[0]
    rows = rows[len(rows) - count :]
    return torch.cat([rows.expand(len(grid), *rows.shape), grid], dim=1)


def _grid(group: AttentionGroup, pieces: Sequence[Tensor]) -> Tensor:
    """The group's rows as [count, longest, heads, head_dim], zeros after each segment's end."""
    rows = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
    if group.cells is not None:
        cells = rows.new_zeros(group.count * group.longest, *rows.shape[1:])
        rows = cells.index_copy(0, group.cells, rows)
    return rows.view(group.count, group.longest, *rows.shape[1:])


AttentionInterface.register(NAME, segments_attention)
