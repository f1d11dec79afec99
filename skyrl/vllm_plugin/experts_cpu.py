"""Lets vLLM 0.32 serve adapters on mixtures of experts on a CPU: the experts keep the CPU's own kernels.

With LoRA enabled vLLM computes experts with Triton's kernels, which can add adapters to experts. A CPU has no Triton,
so the first request ends the engine. skyrl trains no adapters on experts, and `lora_target_modules` tells vLLM so.

Knows one field of vLLM's configuration of experts. Knows nothing of adapters.
"""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig


def keep_cpu_kernels() -> None:
    """Choose the kernels of experts as without LoRA, in this process."""
    original = FusedMoEConfig.__post_init__

    def patched(config: FusedMoEConfig) -> None:
        config.is_lora_enabled = False
        original(config)

    FusedMoEConfig.__post_init__ = patched  # type: ignore[method-assign]
