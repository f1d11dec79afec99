"""Causal attention over packed rows, registered with transformers under the name "skyrl_segments".

Segments are padded to grids (`attention_grids`). Every segment reads the keys and values of the prefix that it
continues, and nothing of other slices. Supports sliding windows, soft-capping and sinks (`attention_kernels`). Knows
nothing of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl.training.backends.torch_lora.attention_grids import FromCells, Grids, IntoCells, Shape
from skyrl.training.backends.torch_lora.attention_kernels import attend, for_all_heads, wants_all_heads
from skyrl.training.backends.torch_lora.block_attention import Scoring
from skyrl.training.backends.torch_lora.device import HOST
from skyrl.training.backends.torch_lora.divided_attention import divided_attention
from skyrl.training.backends.torch_lora.packing import AttentionGroup
from skyrl.training.backends.torch_lora.sequence_part import SequencePart

NAME = "skyrl_segments"
_UNSUPPORTED = ("position_bias",)
KEPT_MASK_BYTES = 64 * 2**20
"""A mask of at most these bytes, one number for each query and key, is made once for all layers, not by up to ten small
operations in each. All masks of 3,800 rows, 4 groups of 16 samples behind prompts of 512 tokens, have 3.6 MB together.
Only sequences of more than 4,096 tokens, with a sliding window or behind a prompt, have larger ones."""
_ALIGNMENT = 16
"""Rows of a mask begin at multiples of so many numbers: the memory-efficient kernel would copy another mask at each
call."""


class PackedGroups(tuple[Sequence[AttentionGroup], ...]):
    """The attention groups of each slice of a micro-batch, and what the first layer makes of them for those after
    it."""

    def __init__(self, slices: Sequence[Sequence[AttentionGroup]]) -> None:
        self._made: dict[int | None, tuple[Grids, Masks]] = {}

    def with_window(self, window: int | None, device: torch.device) -> tuple[Grids, Masks]:
        """window: a layer's sliding window."""
        if window not in self._made:
            grids = Grids.of(self, window, device)
            self._made[window] = grids, Masks([shape for shape, _ in grids.calls], window, device)
        return self._made[window]


class Masks:
    """The masks of some shapes of grids with a layer's sliding window."""

    def __init__(self, shapes: Sequence[Shape], window: int | None, device: torch.device) -> None:
        self._shapes, self._window, self._device = shapes, window, device
        self._masked = [
            shape for shape in dict.fromkeys(shapes) if shape.before or shape.longest > (window or math.inf)
        ]
        self._kept: dict[Any, dict[Shape, Tensor]] = {}

    @property
    def any(self) -> bool:
        """Whether a shape has a mask."""
        return bool(self._masked)

    def of(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """[queries, keys] of a bundle: bool, which keys each row sees; or numbers of `dtype` to be added to scores. A
        large one is bool in any case. None: row i sees the first i + 1 keys."""
        if shape not in self._masked:
            return None
        if dtype not in self._kept:
            self._kept[dtype] = self._make(dtype)
        kept = self._kept[dtype].get(shape)
        return _mask(*shape, self._window, self._device) if kept is None else kept

    def _make(self, dtype: torch.dtype) -> dict[Shape, Tensor]:
        """All masks that are not too large, from one copy to the device."""
        small = [shape for shape in self._masked if shape.queries * shape.keys * dtype.itemsize <= KEPT_MASK_BYTES]
        if not small:
            return {}
        padded = [-(-shape.keys // _ALIGNMENT) * _ALIGNMENT for shape in small]
        sizes = [shape.queries * width for shape, width in zip(small, padded, strict=True)]
        flat = torch.zeros(sum(sizes), dtype=torch.bool)
        for shape, width, part in zip(small, padded, flat.split(sizes), strict=True):
            part.view(-1, width)[:, : shape.keys] = _mask(*shape, self._window, HOST)
        flat = flat.to(self._device)
        if dtype != torch.bool:
            flat = torch.zeros(flat.shape, dtype=dtype, device=self._device).masked_fill_(~flat, -torch.inf)
        return {
            shape: part.view(-1, width)[:, : shape.keys]
            for shape, width, part in zip(small, padded, flat.split(sizes), strict=True)
        }


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
    groups = attention_groups if isinstance(attention_groups, PackedGroups) else PackedGroups(attention_groups)
    grids, masks = groups.with_window(sliding_window, query.device)
    mask_dtype = query.dtype if softcap is None and s_aux is None else torch.bool
    states = [state[0].transpose(0, 1) for state in (query, key, value)]
    if grids.queries is not None:
        indices = (grids.queries, grids.keys, grids.keys)
        states = [IntoCells.apply(state, index) for state, index in zip(states, indices, strict=True)]
    if masks.any and mask_dtype != torch.bool and wants_all_heads(query.device):
        states[1:] = [for_all_heads(state, query.shape[1]) for state in states[1:]]
    sizes = [[bundles * shape.queries for shape, bundles in grids.calls]]
    sizes += [[bundles * shape.keys for shape, bundles in grids.calls]] * 2
    # Cut into parts once: backward then puts their gradients together once, in place of a sum over all cells for each
    parts = zip(*(state.split(of_calls) for state, of_calls in zip(states, sizes, strict=True)), strict=True)
    outputs: list[Tensor] = []
    for (shape, bundles), of_call in zip(grids.calls, parts, strict=True):
        mask = masks.of(shape, mask_dtype)
        output = attend(
            *(part.unflatten(0, (bundles, -1)).transpose(1, 2) for part in of_call),
            mask=mask,
            causal=mask is None,
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    made = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (made if grids.queries is None else FromCells.apply(made, grids.queries))[None], None


def _mask(length: int, together: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each row of a bundle attends to: bool [together * length, before + together * length]. Those of
    the prefix, and those of its own segment up to itself."""
    places = torch.arange(before + length, device=device)
    distance = places[before:, None] - places
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if together == 1:
        return mask
    own = torch.block_diag(*[mask[:, before:]] * together)
    return torch.cat([mask[:, :before].repeat(together, 1), own], dim=1)


AttentionInterface.register(NAME, segments_attention)
