"""The memory that vLLM keeps for adapters on the experts of a mixture, and what to set where it is too much.

Knows configurations. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

from skyrl.config.mixtures import experts_of
from skyrl.config.server import ServerConfig


def room_bytes(config: ServerConfig, model: dict[str, Any]) -> int:
    """What each GPU keeps for adapters on experts, in bfloat16: in each of `max_loras` slots, matrices of rank
    `max_lora_rank` for three projections of every expert. `model`: the text model's part of config.json. With tensor
    parallelism a GPU has all of what is as wide as the hidden states, and its part of what is as wide as an expert.
    0 if adapters do not change experts, or config.json lacks a size."""
    lora, inference = config.backend_config.lora, config.backend_config.inference
    if lora.train_mlp_of_mixtures != "train" or config.full_finetuning:
        return 0
    try:
        layers = model["num_hidden_layers"] - len(model.get("mlp_only_layers") or ())
        width = model["hidden_size"] + model["moe_intermediate_size"] / inference.tensor_parallel_size
    except KeyError:
        return 0
    return int(2 * lora.max_loras * layers * experts_of(model) * lora.max_lora_rank * 3 * width)


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
        "train_mlp_of_mixtures to leave_out or refuse, which keeps none"
    )
