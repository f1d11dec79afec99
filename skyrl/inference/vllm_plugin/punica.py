"""LoRA arithmetic in plain torch: rows are grouped by adapter, and each group is two matrix products.

Knows tensors, on any device, and slots: the number of an adapter's matrices among those that vLLM has stacked. Knows
nothing of requests, adapters' names or how the wrapper for CPUs is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from skyrl.inference.vllm_plugin.logprobs import prompt_slots
from skyrl.inference.vllm_plugin.slots import Slots

Stack = torch.Tensor | Slots
Rows = slice | torch.Tensor
Groups = list[tuple[int, Rows]]


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
    lora_a: tuple[Stack, ...],
    lora_b: tuple[Stack, ...],
    scale: float,
    widths: tuple[int, ...],
) -> None:
    """`y[rows, columns of slice i] += scale * x[rows] @ A_i.T @ B_i.T` for every group, in place.

    y [T, sum(widths)], x [T, H], lora_a[i] [slots, 1, rank, H], lora_b[i] [slots, 1, >= widths[i], rank].
    With `Slots` each matrix has its adapter's own rank, and a slice that the adapter leaves as it is has none.
    """
    for slot, rows in groups:
        if not isinstance(rows, slice):
            rows = rows.to(x.device)
        inputs = x[rows]
        start = 0
        for a, b, width in zip(lora_a, lora_b, widths, strict=True):
            columns = y[:, start : start + width]
            start += width
            of_a, of_b = _matrix(a, slot), _matrix(b, slot)
            if of_a is None or of_b is None:
                continue
            down = inputs.to(of_a.dtype) @ of_a.T
            up = of_b[:width].T
            if isinstance(rows, slice):
                columns[rows].addmm_(down.to(y.dtype), up.to(y.dtype), alpha=scale)
            else:
                columns.index_add_(0, rows, (down @ up).to(y.dtype), alpha=scale)


def _matrix(stack: Stack, slot: int) -> torch.Tensor | None:
    return stack.of(slot) if isinstance(stack, Slots) else stack[slot, 0]


def add_to_logits(
    y: torch.Tensor, x: torch.Tensor, slots: list[int], lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float
) -> None:
    """The adapters' part of logits `y` [n, vocabulary or more], in place. x [n, H]; `slots`: the adapter of each row.

    Raises RuntimeError when there are not as many slots as rows."""
    if x.shape[0] != len(slots):
        raise RuntimeError(f"logits of {x.shape[0]} rows, but the batch has adapters for {len(slots)}")
    width = min(y.shape[1], lora_b.shape[2])
    add_grouped(y, x, group_rows(slots), (lora_a,), (lora_b,), scale, (width,))


class GroupedPunicaWrapperCPU(PunicaWrapperCPU):
    """vLLM's CPU wrapper, but with linear layers and logits computed per adapter.

    vLLM's own has three faults (seen in 0.32.0):
    - A row without an adapter has index -1, and `weights[-1]` is the last slot. When every slot is taken, the wrapper
      computes base-model rows in a batch with LoRA rows with the last slot's adapter.
    - The wrapper maps logits of prompt rows with one index per request, not one per row, which kills the engine.
    - The wrapper copies an adapter's matrices once per row. Decoding takes twice the base model's time; here a fifth
      more.
    """

    _token_groups: Groups
    _request_slots: list[int]

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._token_groups = group_rows(self.token_lora_indices.tolist())
        self._request_slots = self.sampler_indices.tolist()

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[Stack, ...],
        lora_b_stacked: tuple[Stack, ...],
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
        slots = prompt_slots(self.token_lora_indices)
        if slots is None:
            slots = self._request_slots
        add_to_logits(y, x, slots, lora_a_stacked, lora_b_stacked, scale)
