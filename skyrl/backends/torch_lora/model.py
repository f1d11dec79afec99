"""The frozen base model: loads it, prepares it for packed rows and adapters, and checks that the logits stay the same.

Knows transformers. Knows nothing of adapters' weights, passes or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from skyrl.backends.base import Datum, ModelLimits
from skyrl.backends.torch_lora import attention
from skyrl.backends.torch_lora.device import base_dtype
from skyrl.backends.torch_lora.lora import ActiveSegments, LoraSegment, MultiLoraLinear, wrap_linears
from skyrl.backends.torch_lora.packing import PackedSlice, pack
from skyrl.config.server import ConfigError

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class BaseModel:
    """A causal language model whose weights never change.

    Raises ConfigError: the path has no causal language model, or the model has layers that adapters cannot train,
    position embeddings that depend on the batch, or other logits on packed rows than in transformers.
    """

    def __init__(self, path: str, device: torch.device, *, gradient_checkpointing: bool) -> None:
        self.path = path
        self.device = device
        self.active = ActiveSegments()
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=base_dtype(device), attn_implementation="sdpa"
            )
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            raise ConfigError(f"base_model: cannot load {path}: {error}") from error
        self._model.to(device).eval().requires_grad_(False)
        text_config = self._model.config.get_text_config()
        rope = getattr(text_config, "rope_parameters", None) or {}
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise ConfigError(
                f"base_model: {path} has {rope['rope_type']} position embeddings, which depend on the batch"
            )
        self.vocab_size = int(text_config.vocab_size)
        self.max_context = int(text_config.max_position_embeddings)
        expected = self._stock_logits(_probe(self.vocab_size))
        try:
            self.linears = wrap_linears(self._model, self.active)
        except ValueError as error:
            raise ConfigError(f"base_model: {path} ({type(self._model).__name__}): {error}") from error
        self._model.set_attn_implementation(attention.NAME)
        self._verify(expected)
        if gradient_checkpointing:
            self._enable_checkpointing()

    def limits(self, max_model_len: int | None) -> ModelLimits:
        return ModelLimits(self.vocab_size, min(self.max_context, max_model_len or self.max_context))

    @property
    def lm_head(self) -> MultiLoraLinear:
        return next(linear for name, linear in self.linears.items() if name.rsplit(".", 1)[-1] == "lm_head")

    def hidden_states(self, slices: Sequence[PackedSlice]) -> Tensor:
        """Final hidden states [rows, hidden] of packed slices, with the active segments."""
        output = self._model.get_decoder()(
            input_ids=torch.cat([packed.tokens for packed in slices])[None],
            position_ids=torch.cat([packed.positions for packed in slices])[None],
            use_cache=False,
            attention_groups=[group for packed in slices for group in packed.groups],
        )
        return output.last_hidden_state[0]

    @torch.no_grad()
    def _stock_logits(self, data: Sequence[Datum]) -> Tensor:
        rows = [torch.from_numpy(datum.tokens).to(self.device)[None] for datum in data]
        return torch.cat([self._model(input_ids=row, use_cache=False).logits[0].float() for row in rows])

    @torch.no_grad()
    def _verify(self, expected: Tensor) -> None:
        """Raise ConfigError unless packed rows give transformers' logits of each sequence alone, up to rounding."""
        packed = pack(_probe(self.vocab_size), 0, self.device)
        try:
            hidden = self.hidden_states([packed])
            logits = self.lm_head.for_segment(hidden, LoraSegment(0, packed.stop, 1.0)).float()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"base_model: {self.path} cannot run on packed rows: {error}") from error
        tolerance = 1e-3 if hidden.dtype == torch.float32 else 0.1
        worst = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not worst <= tolerance:
            raise ConfigError(
                f"base_model: {self.path} gives other logits on packed rows than in transformers "
                f"(relative difference {worst:.2g}, allowed {tolerance:g}); its architecture is not supported"
            )

    def _enable_checkpointing(self) -> None:
        """Recompute decoder layers in backward. transformers does so only in training mode, so set dropout to 0."""
        for module in self._model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model.train()


def _probe(vocab_size: int) -> list[Datum]:
    """Sequences of 9, 3 and 8 tokens: two attention groups, one of them padded, out of order."""
    rng = np.random.default_rng(0)
    return [Datum(rng.integers(0, vocab_size, size=length), {}) for length in (9, 3, 8)]
