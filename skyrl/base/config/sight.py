"""How the base model of a configuration sees."""

from __future__ import annotations

from skyrl.base.config.server import ServerConfig
from skyrl.base.pictures.sight import Blind, Sight


def sight_of(config: ServerConfig) -> Sight | Blind:
    """Blind if neither the trainer nor the inference servers take pictures: because of the base model, or because the
    operator has switched them off. Servers that skyrl does not run are expected to see. Reads small files of the base
    model."""
    if config.modes.manages_inference and config.backend_config.inference.engine_options.get("language_model_only"):
        return Blind("the operator has switched images off (engine_init_kwargs.language_model_only)")
    try:
        return Sight.of(config.base_model_path)
    except Blind as blind:
        return blind


def takes_pictures(config: ServerConfig) -> bool:
    return isinstance(sight_of(config), Sight)
