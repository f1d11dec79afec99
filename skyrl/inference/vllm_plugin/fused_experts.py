"""Lets vLLM 0.32 read adapters on the experts of Qwen3.5's text model as it reads those of the whole model.

Releases of Qwen3.5 have the gate and up projections of all experts in one tensor, and PEFT trains this tensor with one
pair of matrices. vLLM's class of the whole model reads such adapters, its class of the text model alone does not.

Knows vLLM's switch for this. Knows nothing of adapters' matrices.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

CLASS = "Qwen3_5MoeForCausalLM"
"""Named, not imported: most servers have another model."""


def read_fused_experts() -> None:
    """Patch this process. A second call changes nothing."""
    original = LRUCacheWorkerLoRAManager.create_lora_manager
    if original.__module__ == __name__:
        return

    def create_lora_manager(manager: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if type(model).__name__ == CLASS:
            model.is_3d_moe_weight = True
        return original(manager, model, *args, **kwargs)

    LRUCacheWorkerLoRAManager.create_lora_manager = create_lora_manager  # type: ignore[method-assign]
