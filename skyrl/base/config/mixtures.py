"""Whether a base model is a mixture of experts, by its config.json, and what that means for its adapters.

Reads one small file. Imports neither torch nor transformers, so that the API can ask.
"""

from __future__ import annotations

from typing import Any, Literal

from skyrl.base.model_files import json_of

TrainMlpOfMixtures = Literal["train", "leave_out", "refuse"]

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which configurations count experts. Qwen3-MoE writes the second one, and means the first."""
_WITH_EXPERTS = ("sparse", "moe", "E")
"""What configurations that name the kind of each layer call one with experts."""

TRAIN_MLP_REFUSED = (
    "must be false: the base model is a mixture of experts, and this server does not train its experts; send "
    "train_mlp=False, or ask the operator for trainer.policy.model.lora.train_mlp_of_mixtures = train, which trains "
    "experts too, or leave_out, which trains the other layers"
)
FROZEN_WARNING = (
    "the base model is a mixture of experts: with train_mlp (the default) this server trains attention and "
    "unembedding, and leaves the experts as they are (metric experts_are_frozen:max)"
)
FROZEN_EXPERTS = "experts_are_frozen:max"
"""A metric, 1.0 in every pass of an adapter that asked for `train_mlp` and does not train the experts."""


def is_mixture(base_model: str) -> bool:
    """Whether the base model has experts. False if its config.json is not on this machine."""
    return experts_of(model_config(base_model)) > 0


def model_config(base_model: str) -> dict[str, Any]:
    """The text model's part of `whole_config`."""
    values = whole_config(base_model)
    return values.get("text_config") or values


def whole_config(base_model: str) -> dict[str, Any]:
    """The config.json of a directory, or of a model of the hub that is on this machine. Empty if it cannot be read."""
    return json_of(base_model, "config.json")


def experts_of(config: dict[str, Any]) -> int:
    """How many experts each layer has; 0 for a dense model. `config`: the text model's part of a config.json."""
    return max(config.get(name) or 0 for name in _COUNTS)


def layers_with_experts(config: dict[str, Any]) -> list[int]:
    """The numbers of a mixture's layers that have experts; the others have one MLP, or none. `config`: as `experts_of`,
    with num_hidden_layers."""
    for name in ("mlp_layer_types", "layers_block_type", "hybrid_override_pattern"):
        if found := [number for number, kind in enumerate(config.get(name) or ()) if kind in _WITH_EXPERTS]:
            return found
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step") or 1
    numbers = range(first, config["num_hidden_layers"])
    return [number for number in numbers if number not in dense and (number + 1) % step == 0]
