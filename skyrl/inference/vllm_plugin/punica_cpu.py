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

from skyrl.inference.vllm_plugin.adapter_groups import Groups, add_grouped, add_to_logits, group_rows
from skyrl.inference.vllm_plugin.prompt_rows import prompt_slots


class GroupedPunicaWrapperCPU(PunicaWrapperCPU):
    """vLLM's CPU wrapper, but with linear layers and logits computed per adapter."""

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
        slots = prompt_slots(self.token_lora_indices)
        if slots is None:
            slots = self._request_slots
        add_to_logits(y, x, slots, lora_a_stacked, lora_b_stacked, scale)
