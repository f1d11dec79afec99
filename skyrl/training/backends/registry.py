"""The training backends, by their name in the configuration.

Imports a backend's module only when that backend is built: importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.training.backends.base import Backend

if TYPE_CHECKING:
    from skyrl.training.backends.torch_lora.group import RankGroup


def _torch(config: ServerConfig, ranks: RankGroup | None) -> Backend:
    if config.full_finetuning and ranks is not None:
        from skyrl.training.backends.torch_full.sharded import ShardedFullBackend

        return ShardedFullBackend(config, ranks)
    if config.full_finetuning:
        from skyrl.training.backends.torch_full.backend import TorchFullBackend

        return TorchFullBackend(config)
    if ranks is not None:
        from skyrl.training.backends.torch_lora.sharded import ShardedBackend

        return ShardedBackend(config, ranks)
    from skyrl.training.backends.torch_lora.backend import TorchLoraBackend

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
