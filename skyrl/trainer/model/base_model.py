"""The base model: what describes it, and the checks that packed rows give the logits that transformers gives.

RMS norms become one operation of torch forward and one backward, where transformers starts 8 and 14. A layer of Qwen3
has four norms: 88 operations of some 200, and on a GPU each costs the host 5 µs or more. torch's own operation is one
kernel on CUDA. In float32 it gives transformers' bits on a CPU; in bfloat16 it rounds once, after the product with the
weight, where transformers rounds before it, too. Knows transformers' loading. Knows nothing of adapters' weights,
passes or losses.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from skyrl.base.config.server import ConfigError
from skyrl.base.pictures.vision import VisionConfig
from skyrl.trainer.attention.scans import CHUNK
from skyrl.trainer.device import base_dtype
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.model.loading import attached
from skyrl.trainer.model.packed_model import PackedModel
from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.packing import pack_alone
from skyrl.trainer.rows.routed_experts import FIELD
from skyrl.trainer.vision import VisionProbe, VisionTower

EPSILONS = ("variance_epsilon", "eps")
"""What transformers' classes call it."""


def fuses_norms(device: torch.device) -> bool:
    """On a CPU torch's operation is made of as many others."""
    return device.type == "cuda"


def fuse_norms(model: nn.Module) -> int:
    """Let the model's plain RMS norms compute with torch's operation. Returns how many do. Norms of other formulas,
    with a gate or with 1 added to their weight, stay as they are."""
    plain: dict[type, bool] = {}
    fused = 0
    for module in model.modules():
        kind = type(module)
        if "RMSNorm" not in kind.__name__:
            continue
        if kind not in plain:
            plain[kind] = _is_plain(module)
        if plain[kind]:
            module.forward = functools.partial(_norm, module)
            fused += 1
    return fused


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    """hidden_states [..., size]; the result has its dtype."""
    return functional.rms_norm(hidden_states, module.weight.shape, module.weight, _epsilon(module))


def _epsilon(module: nn.Module) -> float:
    return next(getattr(module, name) for name in EPSILONS if hasattr(module, name))


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    """Whether the module computes what `_norm` does, tried with a small weight in its place. One whose forward takes
    more than hidden states, such as a gate, does not."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or not any(hasattr(module, e) for e in EPSILONS):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, 8))}
    hidden = torch.linspace(-1, 2, 24).view(3, 8)
    try:
        expected = tried(hidden)
    except (RuntimeError, TypeError):  # it needs another size, for example: its formula is another one
        return False
    return torch.allclose(_norm(tried, hidden), expected, rtol=1e-5, atol=1e-6)


_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
UNFIT = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a model raises whose layers do not fit to packed rows."""


_OTHERWISE_CHOSEN = {torch.float32: 0.02, torch.bfloat16: 0.1}
"""The share of the tokens of a choice that rounding may change. Another formula changes more than half of them."""
SPARSE = ("deepseek_v32", "glm_moe_dsa", "glm5_next_text")
"""Kinds of language models whose indexers `attention.indexers` knows."""


class BaseModel:
    """A causal language model whose weights never change. `packed` computes; `targets` and the sizes describe it.
    `tower`: computes pictures; None if the model takes none."""

    def __init__(
        self, path: str, device: torch.device, packed: PackedModel, config: Any, tower: VisionTower | None = None
    ) -> None:
        """`config`: transformers' configuration of the model."""
        text_config = config.get_text_config()
        self.path = path
        self.device = device
        self.packed = packed
        self.tower = tower
        self.vocab_size = packed.transform.ids or int(text_config.vocab_size)
        self.max_context = int(text_config.max_position_embeddings)
        parts = (text_config, config)  # the text part of a model that sees may not say it
        self.ties_unembedding = any(getattr(part, "tie_word_embeddings", False) for part in parts)
        self._vision_probe = None if tower is None else VisionProbe.of(tower, self.vocab_size, device)

    @property
    def targets(self) -> list[Target]:
        """The layers that adapters can train."""
        return self.packed.targets

    @property
    def sight(self) -> VisionConfig | None:
        """How the model sees; None if it takes no pictures."""
        return None if self.tower is None else self.tower.sight

    def probe_rows(self) -> list[Tensor]:
        """The sequences of the probe without pictures, each int64 [1, tokens]."""
        return [torch.from_numpy(datum.tokens).to(self.device)[None] for datum in self._probe()]

    @torch.no_grad()
    def stock_logits(self) -> Tensor:
        """The logits of the probe as transformers computes them: float32 [tokens, vocabulary]. `verify` compares packed
        rows with them."""
        texts = [{"input_ids": row} for row in self.probe_rows()]
        if self._vision_probe is None or self.tower is None:
            return self.packed.stock_logits(texts)
        with attached(self.packed.model, self.tower.module):
            return self.packed.stock_logits([*texts, self._vision_probe.inputs])

    def _probe(self) -> list[Datum]:
        """Sequences of 9, 3 and 8 tokens, in two attention groups, one of them padded, out of order; and two sequences
        that share 34 tokens, with 6 and 5 more in a padded group. For recurrent layers those that share are longer, so
        that a state goes on over chunks before and after the branch."""
        rng = np.random.default_rng(0)
        shared, *own = (34, 6, 5) if not self.packed.reach else (CHUNK + 6, CHUNK + 4, CHUNK + 3)
        data = [rng.integers(0, self.vocab_size, size=length) for length in (9, 3, 8, shared + own[0], shared + own[1])]
        data[4][:shared] = data[3][:shared]
        data[4][shared] = (data[3][shared] + 1) % self.vocab_size
        return [Datum(tokens, {}) for tokens in data]

    def _with_experts(self, data: list[Datum]) -> list[Datum]:
        """With the experts that transformers has chosen for the tokens of `stock_logits`, if the model is a mixture."""
        experts = self.packed.routing.recorded
        if experts is None:
            return data
        parts = np.split(experts.cpu().numpy(), np.cumsum([len(datum.tokens) for datum in data])[:-1])
        return [replace(datum, loss_inputs={FIELD: part}) for datum, part in zip(data, parts, strict=True)]

    @torch.no_grad()
    def verify(self, expected: Tensor) -> None:
        """Raise ConfigError unless packed rows give the `expected` logits of the probe: those that transformers
        computes for each sequence alone, up to rounding. The rows of a mixture use the experts that transformers has
        chosen: rounding may change the choice where two experts are nearly equal. So do those of sparse attention with
        the tokens, of which few may be others than packed rows choose."""
        data, probe = self._probe(), self._vision_probe
        data = self._with_experts(data if probe is None else [*data, probe.datum])
        packed = pack_alone(data, self.device, {} if probe is None else probe.seen)
        rows = torch.from_numpy(np.concatenate(packed.layout.rows_of)).to(self.device)
        try:
            logits = self.packed.packed_logits(packed).index_select(0, rows)
        except UNFIT as error:
            raise ConfigError(f"base_model: {self.path} cannot run on packed rows: {error}") from error
        tolerance = 1e-3 if base_dtype(self.device) == torch.float32 else 0.1
        worst = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not worst <= tolerance:
            raise ConfigError(
                f"base_model: {self.path} gives other logits on packed rows than in transformers "
                f"(relative difference {worst:.2g}, allowed {tolerance:g}); its architecture is not supported"
            )
        allowed = _OTHERWISE_CHOSEN[base_dtype(self.device)]
        if not (difference := self.packed.indexing.difference) <= allowed:
            raise ConfigError(
                f"base_model: {self.path} chooses other tokens for its sparse attention on packed rows than in "
                f"transformers ({difference:.0%} of them, allowed {allowed:.0%}); its architecture is not supported"
            )

    @torch.no_grad()
    def check_stock(self) -> None:
        """Raise ConfigError unless packed rows would get the masks of transformers' own layers, and logprobs its change
        of logits after the output layer. The attention must be transformers' own.

        `verify` cannot tell: a soft-capping far above the probe's logits, and a window longer than the probe, hardly
        change its logits."""
        row = self.probe_rows()[0]
        try:
            calls = self.packed.attention_calls(row)
            if not calls:
                raise ValueError("the model computes attention itself, not by transformers' attention interface")
            for call in calls:
                call.check()
        except UNFIT as error:
            raise ConfigError(f"base_model: {self.path} cannot run on packed rows: {error}") from error
        given, changed = self.packed.changed_logits(row)
        tolerance = 1e-3 if base_dtype(self.device) == torch.float32 else 0.1
        worst = float((self.packed.transform(given) - changed).abs().max() / changed.abs().max().clamp(min=1e-6))
        if not worst <= tolerance:
            raise ConfigError(
                f"base_model: {self.path} makes other numbers of its output layer's logits than logit_scale, "
                "logits_scaling, logits_mup_width_multiplier and final_logit_softcapping of its config.json say "
                f"(relative difference {worst:.2g}, allowed {tolerance:g}); its architecture is not supported"
            )


def check_config(path: str, config: Any) -> None:
    """Raise ConfigError for a model whose position embeddings depend on the batch, or with sparse attention of an
    unknown kind.

    Such attention would pass the comparison of logits: in it, sequences of up to `index_topk` tokens see all of
    theirs."""
    text_config = config.get_text_config()
    tokens = getattr(text_config, "index_topk", None)
    if tokens is not None and text_config.model_type not in SPARSE:
        raise ConfigError(
            f"base_model: {path} ({text_config.model_type}) has sparse attention to the {tokens} tokens that an "
            f"indexer chooses (index_topk), of another kind than {', '.join(SPARSE)}, which is not supported"
        )
    if missing := _missing(text_config):
        raise ConfigError(
            f"base_model: {path} ({text_config.model_type}) has {' and '.join(missing)}, which is not supported"
        )
    rope = getattr(text_config, "rope_parameters", None) or {}
    for kind in (rope, *(each for each in rope.values() if isinstance(each, dict))):  # Gemma 3 has one for each kind
        if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE and not _has_fixed_base(text_config, kind):
            raise ConfigError(
                f"base_model: {path} has {kind['rope_type']} position embeddings, which depend on the batch"
            )


def _missing(config: Any) -> list[str]:
    """What MiniMax-M3, Qwen4 and Llama 4 have, and packed rows do not."""
    found = []
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        found.append(f"attention in chunks of {config.attention_chunk_size} tokens (attention_chunk_size)")
    if config.model_type == "llama4_text":
        found.append("experts whose inputs are weighed in place of their results")
    if "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ()):
        blocks = f"{config.index_topk_blocks} blocks of {config.index_block_size} tokens"
        found.append(f"sparse attention to the {blocks} that an indexer chooses (index_topk_blocks)")
    if (tokens := getattr(config, "indexer_budget", None)) is not None:
        found.append(f"sparse attention to the {tokens} tokens whose blocks an indexer chooses (indexer_budget)")
    if getattr(config, "ple_layer_ids", None):
        found.append("embeddings of n-grams with a convolution over them (ple_layer_ids)")
    return found


def _has_fixed_base(config: Any, rope: Mapping[str, Any]) -> bool:
    """Hunyuan's `dynamic` rope with an `alpha` has the same frequencies for all lengths of the model's context."""
    return config.model_type.startswith("hunyuan") and bool(rope.get("alpha"))
