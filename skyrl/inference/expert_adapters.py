"""The memory that vLLM keeps for adapters on the experts of a mixture, and what to set where it is too much.

Knows configurations. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.model_files import experts_of, layers_with_experts

_MUCH = 16e9
"""Bytes of main memory."""


def room_bytes(config: ServerConfig, model: dict[str, Any]) -> int:
    """What each GPU keeps for adapters on experts, in bfloat16: in each of `max_loras` slots, matrices of rank
    `max_lora_rank` for three projections of every expert. `model`: the text model's part of config.json. With tensor
    parallelism a GPU has all of what is as wide as the hidden states, and its part of what is as wide as an expert.
    0 if adapters do not change experts, or config.json lacks a size."""
    lora, inference = config.backend_config.lora, config.backend_config.inference
    return lora.max_loras * _adapter_bytes(config, model, inference.tensor_parallel_size)


def _adapter_bytes(config: ServerConfig, model: dict[str, Any], parallel: int = 1) -> int:
    """The part on experts of an adapter of `max_lora_rank`, on one of `parallel` GPUs. 0 as for `room_bytes`."""
    lora = config.backend_config.lora
    if lora.train_mlp_of_mixtures != "train" or config.full_finetuning:
        return 0
    try:
        size = model.get("moe_intermediate_size") or model["intermediate_size"]
        layers, width = len(layers_with_experts(model)), model["hidden_size"] + size / parallel
    except KeyError:
        return 0
    return int(2 * layers * experts_of(model) * lora.max_lora_rank * 3 * width)


def host_memory_warning(config: ServerConfig, model: dict[str, Any]) -> str | None:
    """What to set if vLLM may keep much of the host's memory for adapters on experts; else None."""
    adapters = config.backend_config.lora.max_cpu_loras
    room = adapters * _adapter_bytes(config, model)
    if room < _MUCH:
        return None
    return (
        f"trainer.policy.model.lora.max_cpu_loras: {adapters} adapters on the experts of the base model take up to "
        f"{room / 1e9:.3g} GB of the host's memory, in each process of vLLM that has a GPU: lower it if there is less"
    )


def check_layers(config: ServerConfig, model: dict[str, Any]) -> None:
    """Raise ConfigError for a mixture with adapters that vLLM does not load: it takes those on the MLPs of layers
    without experts only if `mlp_only_layers` names some."""
    step = model.get("decoder_sparse_step") or 1
    if step > 1 and not model.get("mlp_only_layers") and config.backend_config.lora.train_mlp_of_mixtures == "train":
        raise ConfigError(
            f"base_model: {config.base_model_path} has layers without experts (decoder_sparse_step {step}), and vLLM "
            "loads no adapters on their MLPs: set trainer.policy.model.lora.train_mlp_of_mixtures to leave_out or "
            "refuse"
        )


def memory_hint(config: ServerConfig, model: dict[str, Any], sentence: str) -> str:
    """What to set if `sentence`, the cause of vLLM's end, is about memory, and vLLM keeps some for adapters on experts;
    else empty."""
    room = room_bytes(config, model)
    if not room or "memory" not in sentence.lower():
        return ""
    lora = config.backend_config.lora
    return (
        f"; vLLM keeps {room / 1e9:.3g} GB for adapters on the experts of the base model: lower "
        f"trainer.policy.model.lora.max_loras ({lora.max_loras}) or max_lora_rank ({lora.max_lora_rank}), or set "
        "train_mlp_of_mixtures to leave_out or refuse, which keeps none, and adapters that train experts already are "
        "then not sampled"
    )
