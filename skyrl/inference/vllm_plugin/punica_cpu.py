"""LoRA arithmetic for vLLM on a CPU: rows are grouped by adapter, and each group is two matrix products.

Replaces vLLM's own CPU wrapper, which has three faults (seen in 0.32.0):
- A row without an adapter has index -1, and `weights[-1]` is the last slot. When every slot is taken, the wrapper
  computes base-model rows in a batch with LoRA rows with the last slot's adapter.
- The wrapper maps logits of prompt rows with one index per request, not one per row, which kills the engine.
- The wrapper copies an adapter's matrices once per row. Decoding takes twice the base model's time; here a fifth more.

Knows tensors and slots. Knows nothing of requests, adapters' names or how the wrapper is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Rows = slice | torch.Tensor
Groups = list[tuple[int, Rows]]

_prompt_rows: slice | None = None


class prompt_rows:
    """A context in which logits belong to these consecutive rows of the forward pass, not to one row per request."""

    def __init__(self, rows: slice) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        global _prompt_rows
        _prompt_rows = self._rows

    def __exit__(self, *_: object) -> None:
        global _prompt_rows
        _prompt_rows = None


def group_rows(slots: list[int]) -> Groups:
    """The rows of each adapter slot; consecutive rows are a slice. Rows without an adapter (-1) are in no group."""
    by_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot >= 0:
            by_slot.setdefault(slot, []).append(row)
    return [
        (slot, slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows))
        for slot, rows in by_slot.items()
    ]


def add_grouped(
    y: torch.Tensor,
    x: torch.Tensor,
    groups: Groups,
    lora_a: tuple[torch.Tensor, ...],
    lora_b: tuple[torch.Tensor, ...],
    scale: float,
    widths: tuple[int, ...],
) -> None:
    """`y[rows, columns of slice i] += scale * x[rows] @ A_i.T @ B_i.T` for every group, in place.

    y [T, sum(widths)], x [T, H], lora_a[i] [slots, 1, rank, H], lora_b[i] [slots, 1, >= widths[i], rank].
    """
    for slot, rows in groups:
        inputs = x[rows]
        start = 0
        for a, b, width in zip(lora_a, lora_b, widths, strict=True):
            down = inputs.to(a.dtype) @ a[slot, 0].T
            up = b[slot, 0, :width].T
            columns = y[:, start : start + width]
            if isinstance(rows, slice):
                columns[rows].addmm_(down.to(y.dtype), up.to(y.dtype), alpha=scale)
            else:
                columns.index_add_(0, rows, (down @ up).to(y.dtype), alpha=scale)
            start += width


class GroupedPunicaWrapperCPU(PunicaWrapperCPU):
    """vLLM's CPU wrapper, but with linear layers and logits computed per adapter."""

    _token_groups: Groups
    _request_groups: Groups

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._token_groups = group_rows(self.token_lora_indices.tolist())
        self._request_groups = group_rows(self.sampler_indices.tolist())

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        add_grouped(y, x, self._token_groups, lora_a_stacked, lora_b_stacked, scale, output_slices)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        if _prompt_rows is None:
            groups, expected = self._request_groups, self.sampler_indices.numel()
        else:
            slots = self.token_lora_indices[_prompt_rows].tolist()
            groups, expected = group_rows(slots), len(slots)
        if x.shape[0] != expected:
            raise RuntimeError(f"logits of {x.shape[0]} rows, but the batch has adapters for {expected}")
        width = min(y.shape[1], lora_b_stacked.shape[2])
        add_grouped(y, x, groups, (lora_a_stacked,), (lora_b_stacked,), scale, (width,))
