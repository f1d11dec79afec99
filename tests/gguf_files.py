"""Writes models of transformers as GGUF files, as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = range(1, 7)
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass
class Words:
    """A vocabulary as GGUF has it. `kind`: gpt2 or llama."""

    tokens: Sequence[str]
    types: Sequence[int]
    kind: str = "gpt2"
    pre: str = "qwen2"
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys: of strings, booleans and integers."""


def filler(rows: int) -> Words:
    """A vocabulary of bytes and fillers, with one merge."""
    alphabet = [*(chr(number) for number in range(33, 33 + min(rows - 1, 89))), "!!"]
    rest = [f"[PAD{number}]" for number in range(len(alphabet), rows)]
    return Words([*alphabet, *rest], [NORMAL] * len(alphabet) + [UNUSED] * len(rest), merges=["! !"])


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    words: Words,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A transformers model as GGUF. `kind`: the type of its matrices. `keys`: further ones of the architecture; None in
    place of a value leaves a key out. `tensors`: further tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
    }
    values |= keys or {}
    for key, value in values.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    _write_words(writer, words)
    state = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, value in state.items():
        _write_tensor(writer, architecture, config, name, value, kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tensor(
    writer: gguf.GGUFWriter, architecture: str, config: Any, name: str, value: np.ndarray, kind: Any
) -> None:
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        value = (
            value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        )
    if architecture == "gemma3" and name.endswith("norm.weight"):
        value = value + np.float32(1)
    stem, suffix = name.removeprefix("model.").rsplit(".", 1)
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        norms = _GEMMA_NORMS if architecture == "gemma3" else _NORMS
        target = f"blk.{layer}.{(_LAYER | norms)[part]}.{suffix}"
    else:
        target = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem] + f".{suffix}"
    if value.ndim == 1:
        writer.add_tensor(target, np.ascontiguousarray(value))
    else:
        writer.add_tensor(target, quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)


def _write_words(writer: gguf.GGUFWriter, words: Words) -> None:
    writer.add_tokenizer_model(words.kind)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types(list(words.types))
    if words.kind == "gpt2":
        writer.add_token_merges(list(words.merges))
    else:
        writer.add_token_scores(list(words.scores))
    for key, value in words.more.items():
        _add(writer, key, value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)
