"""The frozen base model: loads it, prepares it for packed rows and adapters, and checks that the logits stay the same.

Knows transformers' loading. Knows nothing of adapters' weights, passes or losses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl.backends.base import Datum, ModelLimits
from skyrl.backends.torch_lora.adapter import Target
from skyrl.backends.torch_lora.device import base_dtype
from skyrl.backends.torch_lora.packed_model import PackedModel
from skyrl.backends.torch_lora.packing import pack
from skyrl.backends.torch_lora.recomputation import Setting
from skyrl.config.server import ConfigError

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, SafetensorError)
"""What transformers and safetensors raise for a model that is missing, damaged or unknown."""


class BaseModel:
    """A causal language model whose weights never change. `packed` computes; `limits` and `targets` describe it."""

    def __init__(self, path: str, device: torch.device, packed: PackedModel, config: Any) -> None:
        """`config`: transformers' configuration of the model."""
        text_config = config.get_text_config()
        self.path = path
        self.device = device
        self.packed = packed
        self.vocab_size = int(text_config.vocab_size)
        self.max_context = int(text_config.max_position_embeddings)

    @property
    def targets(self) -> list[Target]:
        """The layers that adapters can train, in module order."""
        return [linear.target for linear in self.packed.linears.values()]

    def limits(self, max_model_len: int | None) -> ModelLimits:
        return ModelLimits(self.vocab_size, min(self.max_context, max_model_len or self.max_context))

    def probe_rows(self) -> list[Tensor]:
        """The sequences of the probe, each int64 [1, tokens]."""
        return [torch.from_numpy(datum.tokens).to(self.device)[None] for datum in _probe(self.vocab_size)]

    @torch.no_grad()
    def verify(self, expected: Tensor) -> None:
        """Raise ConfigError unless packed rows give the `expected` logits of the probe: those that transformers
        computes for each sequence alone, up to rounding."""
        packed = pack(_probe(self.vocab_size), 0, self.device)
        try:
            logits = self.packed.packed_logits(packed)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"base_model: {self.path} cannot run on packed rows: {error}") from error
        tolerance = 1e-3 if base_dtype(self.device) == torch.float32 else 0.1
        worst = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not worst <= tolerance:
            raise ConfigError(
                f"base_model: {self.path} gives other logits on packed rows than in transformers "
                f"(relative difference {worst:.2g}, allowed {tolerance:g}); its architecture is not supported"
            )


def load_base_model(path: str, device: torch.device, *, gradient_checkpointing: Setting) -> BaseModel:
    """The whole model on one device.

    Raises ConfigError: the path has no causal language model, or the model has layers that adapters cannot train,
    position embeddings that depend on the batch, or other logits on packed rows than in transformers.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=base_dtype(device), attn_implementation="sdpa")
    except LOADING_ERRORS as error:
        raise ConfigError(f"base_model: cannot load {path}: {error}") from error
    model.to(device).eval().requires_grad_(False)
    check_config(path, model.config)
    packed = wrap(path, model)
    base = BaseModel(path, device, packed, model.config)
    with torch.no_grad():
        expected = packed.stock_logits(base.probe_rows())
    packed.use_packed_attention()
    base.verify(expected)
    packed.recompute(gradient_checkpointing)
    return base


def check_config(path: str, config: Any) -> None:
    """Raise ConfigError for a model whose position embeddings depend on the batch."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(f"base_model: {path} has {rope['rope_type']} position embeddings, which depend on the batch")


def wrap(path: str, model: Any) -> PackedModel:
    """Raises ConfigError for a model with layers that adapters cannot train."""
    try:
        return PackedModel(model)
    except ValueError as error:
        raise ConfigError(f"base_model: {path} ({type(model).__name__}): {error}") from error


def _probe(vocab_size: int) -> list[Datum]:
    """Sequences of 9, 3 and 8 tokens: two attention groups, one of them padded, out of order."""
    rng = np.random.default_rng(0)
    return [Datum(rng.integers(0, vocab_size, size=length), {}) for length in (9, 3, 8)]
