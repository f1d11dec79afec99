"""vLLM's own calls for new weights, which trainers make to a vLLM without a sidecar. They are refused: vLLM writes what
arrives into the model that serves, so a half of an update would be sampled from, and no sample could say which weights
it has."""

from __future__ import annotations

from skyrl.inference.sidecar.errors import NotOffered

VLLM_UPDATES = frozenset(
    {
        *("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights"),
        *("/finish_weight_update", "/shutdown_weight_transfer_engine"),
    }
)
INSTEAD = (
    "send new weights with /update_weights_from_disk, or with /init_weights_update_group and "
    "/update_weights_from_distributed (skyrl.weights has clients of these), or train against a vLLM without a sidecar"
)


def not_offered(path: str) -> NotOffered:
    """For a path of `VLLM_UPDATES`."""
    return NotOffered(f"{path}: vLLM's own weight transfer is not offered here: {INSTEAD}")


def config_refusal() -> NotOffered:
    """For vLLM's form of `/server_info`, which trainers ask before a weight transfer."""
    return NotOffered(f"config_format: vLLM's configuration is not shown here. For its weight transfer: {INSTEAD}")
