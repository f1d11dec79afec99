"""Which tensors of a model's files are quantized: the large matrices of its decoder layers, experts among them.

Knows transformers' models and how their files are named. Knows nothing of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.torch_lora.conversions import stored_parameters
from skyrl.training.backends.torch_lora.projections import experts_in
from skyrl.training.backends.torch_lora.stored_weights import StoredWeights
from skyrl.training.backends.torch_lora.text_part import detach_vision, model_class

SMALL = (
    *("in_proj_b", "in_proj_a", "in_proj_ba"),
    *("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
    "shared_expert_gate",
)
"""Linear layers that stay as they are: gates of the delta rule and of shared experts, with a few rows each."""


def large_matrices(path: str, config: Any, stored: StoredWeights) -> list[str]:
    """The names of the files' tensors that are quantized. config: transformers', of the model whose files are open as
    `stored`.

    Raises ConfigError for experts that the files do not hold as one matrix for each expert and projection."""
    with torch.device("meta"):
        model: Any = model_class(config).from_config(config)
    detach_vision(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    rows = stored_parameters(model, shapes, dict.fromkeys(stored.keys(), stored))
    found: list[str] = []
    for name in _large_parameters(model):
        try:
            tensors = rows[name].tensors
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        for tensor, shape in tensors.items():
            if len(shape) != 2:
                raise ConfigError(
                    f"{path}: {tensor} holds all experts of a layer, {list(shape)}, and compressed-tensors has a "
                    "matrix for each expert: models of this family cannot be quantized here"
                )
            found.append(tensor)
    return found


def _large_parameters(model: Any) -> Iterator[str]:
    layers = {id(module) for module in model.get_decoder().layers.modules()}
    for name, module in model.named_modules():
        small = name.rsplit(".", 1)[-1] in SMALL
        if isinstance(module, nn.Linear) and id(module) in layers and not small:
            yield f"{name}.weight"
    for name, module in experts_in(model):
        for leaf, parameter in module.named_parameters():
            if parameter.ndim == 3:
                yield f"{name}.{leaf}"
