"""Lets vLLM 0.32 read adapters on experts by the names that trainers give them, in every architecture.

In transformers a layer's experts are `mlp.experts`, with projections `gate_proj`, `up_proj` and `down_proj`. Some of
vLLM's models have them elsewhere (`block_sparse_moe.experts`), or call the projections w1, w3 and w2, and then refuse
the adapter.

Knows how vLLM's models name experts. Knows nothing of adapters' matrices.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.utils import get_moe_expert_mapping

_LETTERS = {".gate_proj.lora_": ".w1.lora_", ".up_proj.lora_": ".w3.lora_", ".down_proj.lora_": ".w2.lora_"}


def read_trainers_names() -> None:
    """Patch this process. A second call changes nothing."""
    original = LRUCacheWorkerLoRAManager.create_lora_manager
    if original.__module__ == __name__:
        return

    def create_lora_manager(manager: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if renamed := renamed_experts(model):
            own = getattr(model, "hf_to_vllm_mapper", None) or WeightsMapper()
            model.hf_to_vllm_mapper = own | WeightsMapper(orig_to_new_substr=renamed)
        return original(manager, model, *args, **kwargs)

    LRUCacheWorkerLoRAManager.create_lora_manager = create_lora_manager  # type: ignore[method-assign]


def renamed_experts(model: nn.Module) -> dict[str, str]:
    """What to replace in the names of an adapter's tensors for this model; empty for models without experts, and where
    the names are vLLM's."""
    paths = [name for name, module in model.named_modules() if isinstance(module, MoERunner)]
    if not paths:
        return {}
    parent = paths[0].split(".")[-2]
    renamed = {} if parent == "mlp" else {".mlp.experts.": f".{parent}.experts."}
    if any(weight.rstrip(".").endswith(".w1") for _, weight, _, _ in get_moe_expert_mapping(model)):
        renamed |= _LETTERS
    return renamed
