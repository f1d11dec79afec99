"""The features. Importing this package fills the catalogue, in the order of the table."""

from __future__ import annotations

from importlib import import_module

from ..catalogue import CATALOGUE

__all__ = ["CATALOGUE"]

GROUPS = (
    "sessions",
    "models",
    "passes",
    "losses",
    "checkpoints",
    "exports",
    "samplers",
    "sampling",
    "logprobs",
    "pictures",
    "account",
    "command_line",
)

for _group in GROUPS:
    import_module(f"{__name__}.{_group}")
