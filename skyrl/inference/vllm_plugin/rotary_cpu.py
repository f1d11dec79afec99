"""Corrects vLLM 0.32's rotary embeddings of latent attention on a CPU.

vLLM's kernel for CPUs takes queries [tokens, heads * size]. Latent attention hands it views [tokens, heads, size], of
which the kernel turns one head, and for keys rows of another stride: logprobs of DeepSeek's kind are off by whole nats.
The plugin computes such queries in plain torch, with vLLM's own function.

Knows vLLM's layer for rotary embeddings.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def turn_all_heads() -> None:
    """Patch this process."""
    original = RotaryEmbedding.forward_cpu

    def forward_cpu(
        layer: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() == 2:
            return original(layer, positions, query, key)
        return layer.forward_native(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]
