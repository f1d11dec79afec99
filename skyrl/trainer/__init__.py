"""The trainer: computes losses and gradients of a model, or of adapters on it, and makes the optimizer's steps.

Knows arrays, torch and transformers. Knows nothing of the database, the wire, requests or vLLM. `protocol` says what
the engine calls. Importing this package does not import torch: a backend's module is imported when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.trainer.protocol import Backend

if TYPE_CHECKING:
    from skyrl.trainer.ranks.over_ranks import RankGroup


def _torch(config: ServerConfig, ranks: RankGroup | None) -> Backend:
    if config.full_finetuning and ranks is not None:
        from skyrl.trainer.ranks.full_backend import ShardedFullBackend

        return ShardedFullBackend(config, ranks)
    if config.full_finetuning:
        from skyrl.trainer.ranks.full_backend import TorchFullBackend

        return TorchFullBackend(config)
    if ranks is not None:
        from skyrl.trainer.ranks.lora_backend import ShardedBackend

        return ShardedBackend(config, ranks)
    from skyrl.trainer.ranks.lora_backend import TorchLoraBackend

    return TorchLoraBackend(config)


_FACTORIES: dict[str, Callable[[ServerConfig, RankGroup | None], Backend]] = {"fsdp": _torch}


def create_backend(name: str, config: ServerConfig, ranks: RankGroup | None = None) -> Backend:
    """Build the backend `name` and load its base model: on this process's device, or on `ranks`, which the backend ends
    when it is closed, or cannot be built.

    Raises ConfigError: there is no such backend, or the backend cannot train the base model.
    """
    if name not in _FACTORIES:
        raise ConfigError(f"no training backend {name!r}; there are: {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[name](config, ranks)
