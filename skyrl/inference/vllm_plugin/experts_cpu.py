"""Lets vLLM 0.32 serve adapters on mixtures of experts on a CPU, whether they change experts or not.

With LoRA enabled vLLM computes experts with Triton's kernels, which can add adapters to experts. A CPU has no Triton,
so the first request ends the engine. The plugin chooses another kernel: one that adds adapters, if
`lora_target_modules` names experts; else the CPU's own, as without LoRA. Experts without a gate always get the first
one: the CPU has no kernel for them.

Knows how vLLM chooses the kernel of experts. Knows nothing of adapters.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from skyrl.inference.vllm_plugin.expert_adapters_cpu import ACTIVATIONS, AdaptedExperts

EXPERTS = "experts"


def choose_cpu_kernels() -> None:
    """Patch this process."""
    method: Any = unquantized_fused_moe_method
    initialize, select = FusedMoEConfig.__post_init__, method.select_unquantized_moe_backend

    def patched_initialize(config: FusedMoEConfig) -> None:
        config.is_lora_enabled = config.is_lora_enabled and _adapters_change_experts()
        activation = config.activation
        if not activation.is_gated:
            config.activation = MoEActivation.SILU  # otherwise vLLM refuses the model
        initialize(config)
        config.activation = activation

    def patched_select(moe_config: FusedMoEConfig) -> Any:
        if not moe_config.is_lora_enabled and moe_config.is_act_and_mul:
            return select(moe_config)
        check_kernel(moe_config)
        return UnquantizedMoeBackend.CPU, AdaptedExperts

    FusedMoEConfig.__post_init__ = patched_initialize  # type: ignore[method-assign]
    method.select_unquantized_moe_backend = patched_select


def check_kernel(moe_config: Any) -> None:
    """Raise ValueError for experts that the kernel for adapters cannot compute."""
    if moe_config.activation not in ACTIVATIONS:
        known = ", ".join(activation.value for activation in ACTIVATIONS)
        raise ValueError(
            f"on a CPU adapters change experts with one of the activations {known}, not {moe_config.activation}"
        )
    if moe_config.use_ep:
        raise ValueError("on a CPU adapters do not change experts with expert parallelism (enable_expert_parallel)")


def _adapters_change_experts() -> bool:
    """vLLM takes all layers if no target is named."""
    lora = get_current_vllm_config().lora_config
    return lora is not None and (lora.target_modules is None or EXPERTS in lora.target_modules)
