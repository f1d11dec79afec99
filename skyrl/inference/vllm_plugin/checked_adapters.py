"""Refuses adapters that vLLM 0.32 would load in part, or that would fail in the middle of being loaded.

vLLM ignores some parts without a word: experts where `lora_target_modules` does not name them, layers that it does not
know, layers that it multiplies into others or computes outside of their class. Samples would then come from other
weights than were trained. Other parts raise an error after the adapter has taken a slot.

Knows how vLLM names the parts of a loaded adapter, and which of its layers look trainable and are not. Knows nothing of
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from vllm.lora.layers import FusedMoE3DWithLoRA
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.models.utils import PPMissingLayer

_GATE = "shared_expert_gate"
_LATENT = "kv_b_proj"
_EXPERTS = ".experts"


def check_loaded_adapters() -> None:
    """Patch this process. A second call changes nothing."""
    original = WorkerLoRAManager._load_adapter
    if original.__module__ == __name__:
        return

    def load_adapter(manager: Any, lora_request: Any) -> Any:
        adapter = original(manager, lora_request)
        check_adapter(adapter.loras, manager._adapter_manager)
        return adapter

    WorkerLoRAManager._load_adapter = load_adapter  # type: ignore[method-assign]


def check_adapter(parts: Mapping[str, Any], manager: Any) -> None:
    """Raise ValueError for an adapter that vLLM would not serve as a whole. `parts`: each layer's matrices by the name
    that vLLM gives the layer; `manager`: vLLM's, which knows its layers with adapters."""
    fused = {name: [name, f"{name}.base_layer"] for name, module in manager.modules.items() if _is_fused(module)}
    groups = manager.packed_modules | fused
    known = (set(manager.modules) - set(manager.packed_modules)).union(*groups.values())
    for name, part in parts.items():
        if name not in known:
            _check_experts(name, manager)
            if not _is_on_another_device(name, manager.model):
                raise ValueError(f"the adapter changes {name}, which vLLM computes without adapters")
        _check_ignored(name, manager.model)
        matrices, most = part.lora_a.shape[0], manager.lora_config.max_lora_rank
        layer = name.removesuffix(".base_layer")
        rank = matrices // manager.modules[layer].global_num_experts if layer in fused else matrices
        if rank > most:
            raise ValueError(f"the adapter has rank {rank} for {name}, and vLLM keeps room for {most} (max_lora_rank)")
    for packed, names in groups.items():
        lacking = [name for name in names if name not in parts]
        if 0 < len(lacking) < len(names) and _needs_all(packed, manager.modules[packed], len(names)):
            raise ValueError(f"the adapter lacks {lacking[0]}: vLLM loads all parts of {packed} or none")


def _check_experts(name: str, manager: Any) -> None:
    """Raise ValueError for a part of experts that has no place in vLLM."""
    layer, found, rest = name.partition(_EXPERTS)
    if not found:
        return
    if f"{layer}{_EXPERTS}" not in manager.modules:
        raise ValueError(
            f"the adapter changes experts ({name}), and vLLM keeps no room for adapters on them: set "
            "trainer.policy.model.lora.train_mlp_of_mixtures to train"
        )
    if rest in ("", ".base_layer"):
        raise ValueError(
            f"the adapter has matrices for all experts of {layer}{_EXPERTS} together, and vLLM reads a pair for each "
            f"expert and projection ({layer}{_EXPERTS}.0.gate_proj)"
        )


def _check_ignored(name: str, model: nn.Module) -> None:
    """Raise ValueError for layers that vLLM wraps for adapters, and whose adapters it then does not apply."""
    parent, _, leaf = name.rpartition(".")
    if leaf == _GATE or (leaf == _LATENT and hasattr(model.get_submodule(parent), "mla_attn")):
        raise ValueError(f"the adapter changes {name}, and vLLM ignores adapters on {leaf}")


def _is_fused(module: Any) -> bool:
    """Experts with one pair of matrices for the gate and up projections of all of them, and one for down."""
    return isinstance(module, FusedMoE3DWithLoRA)


def _needs_all(packed: str, module: Any, parts: int) -> bool:
    """vLLM packs experts only with all their matrices. A layer that has more slices than parts cannot tell which
    slices a lacking part had."""
    return packed.endswith(_EXPERTS) or getattr(module, "n_slices", parts) != parts


def _is_on_another_device(name: str, model: nn.Module) -> bool:
    """With pipeline parallelism a device has some of the layers."""
    module: Any = model
    for attribute in name.split("."):
        module = getattr(module, attribute, None)
        if isinstance(module, PPMissingLayer):
            return True
    return False
