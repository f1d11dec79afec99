"""The part of a base model that computes text: which class of transformers loads it, apart from what is for pictures.

Names of modules stay those of the whole model: PEFT and vLLM know adapters by them. Knows nothing of packed rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from skyrl.base.pictures.vision import SEES

SEEING = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "kimi_k25", "nemotron_h_omni"})
"""Model types with a vision tower whose class computes text alone as its text model does."""


def model_class(config: Any) -> Any:
    """transformers' class that loads models of this configuration."""
    return AutoModelForImageTextToText if config.model_type in SEEING else AutoModelForCausalLM


TOWER = "visual"
"""The module that computes pictures, beside the language model, in models of the types that see (`SEES`)."""


def detach_vision(model: Any) -> Any:
    """Take off what computes pictures, so that the rest is the language model and its output layer. Returns the vision
    tower with its projector, or None if the model has none that this trainer runs."""
    if model.config.model_type not in SEEING:
        return None
    inner: nn.Module = getattr(model, "model", model)
    tower = None
    if model.config.model_type in SEES:
        tower = getattr(inner, TOWER)
        # The tower keeps its own: transformers writes the language model's attention into all that a model has
        model.config.vision_config = copy.deepcopy(model.config.vision_config)
    for name, _ in list(inner.named_children()):
        if name not in ("language_model", "lm_head"):
            delattr(inner, name)
    if inner is model:  # the output layer is in the language model, where transformers does not look for it
        text = model.language_model
        model.get_decoder, model.get_output_embeddings = text.get_decoder, text.get_output_embeddings
    return tower


@contextmanager
def attached(model: Any, tower: nn.Module) -> Iterator[None]:
    """Inside, the model has its vision tower again, and computes pictures as transformers does."""
    setattr(model.model, TOWER, tower)
    try:
        yield
    finally:
        delattr(model.model, TOWER)
