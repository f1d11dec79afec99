"""The part of a base model that computes text: which class of transformers loads it, without what is for pictures.

Names of modules stay those of the whole model: PEFT and vLLM know adapters by them. Knows nothing of packed rows.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

SEEING = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "kimi_k25", "nemotron_h_omni"})
"""Model types with a vision tower whose class computes text alone as its text model does."""


def model_class(config: Any) -> Any:
    """transformers' class that loads models of this configuration."""
    return AutoModelForImageTextToText if config.model_type in SEEING else AutoModelForCausalLM


def drop_vision(model: Any) -> None:
    """Free what computes pictures, so that the rest is the language model and its output layer."""
    if model.config.model_type not in SEEING:
        return
    inner: nn.Module = getattr(model, "model", model)
    for name, _ in list(inner.named_children()):
        if name not in ("language_model", "lm_head"):
            delattr(inner, name)
    if inner is model:  # the output layer is in the language model, where transformers does not look for it
        text = model.language_model
        model.get_decoder, model.get_output_embeddings = text.get_decoder, text.get_output_embeddings
