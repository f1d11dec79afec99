"""Patches of vLLM 0.32 that a GPU needs. `patch_cuda` is their index.

Knows where the wrapper for GPUs adds adapters to logits; `punica` has the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from skyrl.inference.vllm_plugin.logprobs import prompt_slots
from skyrl.inference.vllm_plugin.punica import add_to_logits


def patch_cuda() -> None:
    """The patches of a process on a GPU."""
    correct_prompt_logits()


def correct_prompt_logits() -> None:
    """Correct adapters' part of the logits of prompts.

    vLLM's kernels find the adapter of a row of logits in a map with one entry per request. For logits of a prompt,
    which have one row per token, they find another request's adapter, none, or memory beyond the map. The plugin
    computes these logits in plain torch, as on a CPU. Logits that are sampled from stay vLLM's.
    """
    original = PunicaWrapperGPU.add_lora_logits

    def add_lora_logits(
        wrapper: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        slots = prompt_slots(wrapper.token_lora_indices)
        if slots is None:
            original(wrapper, y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)
            return
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        add_to_logits(y, x, slots, lora_a_stacked, lora_b_stacked, scale)

    PunicaWrapperGPU.add_lora_logits = add_lora_logits  # type: ignore[method-assign]
