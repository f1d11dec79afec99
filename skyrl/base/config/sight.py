"""How the base model of a configuration sees."""

from __future__ import annotations

from skyrl.base.config.server import ServerConfig
from skyrl.base.pictures.sight import Blind, Sight


def sight_of(config: ServerConfig) -> Sight | Blind:
    """Reads two small files of the base model."""
    try:
        return Sight.of(config.base_model_path)
    except Blind as blind:
        return blind
