"""The trainer: computes losses and gradients of a model, or of adapters on it, and makes the optimizer's steps.

Knows arrays, torch and transformers. Knows nothing of the database, the wire, requests or vLLM. `protocol` says what
the engine calls. Importing this package does not import torch: a backend's module is imported when it is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.trainer.protocol import Backend

if TYPE_CHECKING:
    from skyrl.trainer.ranks.lora_backend import RankGroup

BACKEND = "fsdp"


def create_backend(config: ServerConfig, ranks: RankGroup | None = None) -> Backend:
    """Build the backend and load its base model: on this process's device, or on `ranks`, which the backend ends when
    it is closed, or cannot be built.

    Raises ConfigError: there is no such backend, or the backend cannot train the base model.
    """
    if config.backend != BACKEND:
        raise ConfigError(f"no training backend {config.backend!r}; there are: {BACKEND}")
    if config.full_finetuning:
        from skyrl.trainer.ranks.full_backend import FullBackend

        return FullBackend(config, ranks)
    from skyrl.trainer.ranks.lora_backend import LoraBackend

    return LoraBackend(config, ranks)
