"""A GGUF file as a Hugging Face directory that trainer and vLLM load: the process of `skyrl model from-gguf`.

Arguments: FILE OUT DTYPE. Ends with 2 and one sentence when it cannot. Writes weights, config.json and tokenizer, some
rows at a time. Knows GGUF's names, llama.cpp's layouts of weights, and transformers' configurations. Knows nothing of
adapters or passes. What it does not know of a file, it refuses: a model that is almost converted computes wrong
numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from skyrl.base.config.server import ConfigError
from skyrl.trainer.files.model_files import bytes_of
from skyrl.trainer.files.tensor_files import check_new, row_parts, sharded_files
from skyrl.trainer.tools.gguf import GgufFile, only_known, write_tokenizer

ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_KNOWN = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "attention.causal"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("expert_count", "expert_used_count"),
}
_GEMMA = {"attention.sliding_window", "final_logit_softcapping"}
_TOP = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_PERIOD = 6
"""Every sixth layer of Gemma 3 attends to the whole context, the others to a window."""
_GEMMA_27B_LAYERS = 62
"""Of the model that scales its attention by the hidden size over the heads, not by a head's size; as in llama.cpp."""


@dataclass(frozen=True)
class Architecture:
    """One of GGUF's. `classes`: transformers' names of the configuration and of the model."""

    classes: tuple[str, str]
    configure: Callable[[GgufFile, dict[str, Any]], dict[str, Any]]
    layer_names: dict[str, str] = field(default_factory=lambda: _LAYER)
    known: frozenset[str] = frozenset(_KNOWN)
    rotary_pairs: bool = False
    """llama.cpp has the two halves of a pair of queries and keys side by side."""
    norm_offset: float = 0.0
    """What the file's norms hold more than transformers'."""


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ConfigError for an architecture that cannot be converted."""
    name = file.required("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has the architecture {name}, which cannot be converted (but {', '.join(ARCHITECTURES)})"
        )
    chosen = ARCHITECTURES[name]
    only_known(file, name, chosen.known)
    return chosen


def configuration(file: GgufFile, chosen: Architecture) -> Any:
    """transformers' configuration. Raises ConfigError for what transformers' class of the model does not compute."""
    import transformers

    name = file.required("general.architecture")

    def of(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{name}.{key}", default)

    if of("expert_count", 0):
        raise ConfigError(f"{file.path} is a mixture of experts, which cannot be converted")
    if not of("attention.causal", True):
        raise ConfigError(f"{file.path}: {name}.attention.causal is false: it is no language model")
    for key in ("embedding_length", "block_count", "feed_forward_length", "attention.head_count", "context_length"):
        if not isinstance(file.required(f"{name}.{key}"), int):
            raise ConfigError(f"{file.path}: {name}.{key} is not one number for all layers")
    heads, hidden = of("attention.head_count"), of("embedding_length")
    head = of("attention.key_length", hidden // heads)
    if of("attention.value_length", head) != head or of("rope.dimension_count", head) != head:
        raise ConfigError(
            f"{file.path}: {name}.attention.value_length and {name}.rope.dimension_count must be the size of a "
            f"head, {head}"
        )
    if not isinstance(key_heads := of("attention.head_count_kv", heads), int):
        raise ConfigError(f"{file.path}: {name}.attention.head_count_kv is not one number for all layers")
    for tensor in (EMBEDDING, "output_norm.weight"):
        if tensor not in file.tensors:
            raise ConfigError(f"{file.path} lacks the tensor {tensor}")
    shared: dict[str, Any] = {
        "vocab_size": file.tensors[EMBEDDING][0],
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head,
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": _short(file.required(f"{name}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": HEAD not in file.tensors or file.same(HEAD, EMBEDDING),
        "architectures": [chosen.classes[1]],
        **{
            f"{role}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
            for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }
    try:
        return getattr(transformers, chosen.classes[0])(**chosen.configure(file, shared))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{file.path}: its metadata make no model: {' '.join(str(error).split())[:300]}") from error


def name_in_transformers(tensor: str, chosen: Architecture) -> str | None:
    """The name of a tensor of the file in transformers' model; None for one that it does not have as a weight. Raises
    KeyError for a name that is not known."""
    if tensor == ROPE_FACTORS:
        return None
    if tensor in _TOP:
        return _TOP[tensor]
    block, layer, part, kind = tensor.split(".") if tensor.count(".") == 3 else ("", "", "", "")
    if block != "blk" or not layer.isdecimal() or kind not in ("weight", "bias"):
        raise KeyError(tensor)
    return f"model.layers.{layer}.{chosen.layer_names[part]}.{kind}"


def row_order(tensor: str, chosen: Architecture, config: Any, rows: int) -> npt.NDArray[np.int64] | None:
    """Which row of the file each row of transformers' is; None where they are the same."""
    part = tensor.split(".")[-2]
    if not chosen.rotary_pairs or part not in ("attn_q", "attn_k"):
        return None
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _llama(file: GgufFile, shared: dict[str, Any]) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in file.tensors
    rope = _rope(file, 10_000.0)
    if ROPE_FACTORS in file.tensors:
        rope |= _llama3_scaling(file, rope, shared["head_dim"])
    return {**shared, "attention_bias": biased, "mlp_bias": False, "rope_parameters": rope}


def _qwen2(file: GgufFile, shared: dict[str, Any]) -> dict[str, Any]:
    if shared["head_dim"] * shared["num_attention_heads"] != shared["hidden_size"]:
        raise ConfigError(f"{file.path}: the heads of a qwen2 must be as wide as its hidden size together")
    without = {key: value for key, value in shared.items() if key != "head_dim"}
    return {**without, "use_sliding_window": False, "rope_parameters": _rope(file, 10_000.0)}


def _qwen3(file: GgufFile, shared: dict[str, Any]) -> dict[str, Any]:
    return {**shared, "attention_bias": False, "use_sliding_window": False, "rope_parameters": _rope(file, 10_000.0)}


def _gemma3(file: GgufFile, shared: dict[str, Any]) -> dict[str, Any]:
    layers = shared["num_hidden_layers"]
    of_27b = shared["hidden_size"] // shared["num_attention_heads"]
    whole = [(layer + 1) % _GEMMA_PERIOD == 0 for layer in range(layers)]
    return {
        **shared,
        "query_pre_attn_scalar": of_27b if layers == _GEMMA_27B_LAYERS else shared["head_dim"],
        "sliding_window": file.required("gemma3.attention.sliding_window"),
        "layer_types": ["full_attention" if each else "sliding_attention" for each in whole],
        "final_logit_softcapping": file.metadata.get("gemma3.final_logit_softcapping"),
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": _rope(file, 1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }


def _rope(file: GgufFile, default_base: float) -> dict[str, Any]:
    prefix = f"{file.required('general.architecture')}.rope"
    base = _short(file.metadata.get(f"{prefix}.freq_base", default_base))
    kind = file.metadata.get(f"{prefix}.scaling.type", "none")
    factor = _short(file.metadata.get(f"{prefix}.scaling.factor", 1.0))
    if kind not in ("none", "linear"):
        raise ConfigError(f"{file.path}: {prefix}.scaling.type is {kind}, which cannot be converted (but none, linear)")
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    return {"rope_type": "default", "rope_theta": base}


def _llama3_scaling(file: GgufFile, rope: dict[str, Any], head: int) -> dict[str, Any]:
    """Llama 3.1's scaling, if the file's factors are those that it gives with the largest of them. The factors are
    transformers' formula, `_compute_llama3_parameters` in its modeling_rope_utils.py."""
    found = file.rows(ROPE_FACTORS, slice(None)).astype(np.float64)
    factor, low, high, original = float(found.max()), 1.0, 4.0, 8192
    frequencies = rope["rope_theta"] ** -(np.arange(0, head, 2) / head)
    turns = original * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} does not hold the factors of Llama 3.1's scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _short(value: Any) -> float:
    """The shortest decimal number that is this float32: files hold 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


ARCHITECTURES = {
    "llama": Architecture(("LlamaConfig", "LlamaForCausalLM"), _llama, rotary_pairs=True),
    "qwen2": Architecture(("Qwen2Config", "Qwen2ForCausalLM"), _qwen2),
    "qwen3": Architecture(("Qwen3Config", "Qwen3ForCausalLM"), _qwen3),
    "gemma3": Architecture(
        ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        _gemma3,
        _GEMMA_LAYER,
        frozenset(_KNOWN | _GEMMA),
        norm_offset=1.0,
    ),
}


SHARD = "4GB"
_KEPT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtype of a directory whose file is not quantized."""


@dataclass(frozen=True)
class Converted:
    """What was written. `notes`: sentences for the user."""

    architecture: str
    parameters: int
    tokens: int
    dtype: str
    notes: tuple[str, ...]


def convert(path: Path, out: Path, dtype: str | None = None) -> Converted:
    """Write the model of the GGUF file at `path` to the directory `out`, which must be new or empty. `dtype`: float32,
    bfloat16 or float16; None is that of the file's embedding, and bfloat16 for one that is quantized. config.json comes
    last: without it nothing loads what an interrupted run has left.

    Raises ConfigError: the file is damaged, or has an architecture, a type, a vocabulary or a setting that cannot be
    converted; or `out` is not empty. Raises OSError."""
    file = GgufFile(path)
    chosen = architecture_of(file)
    config = configuration(file, chosen)
    names = _names(file, chosen, config)
    check_new(out)
    kind = dtype or _KEPT.get(file.type_of(EMBEDDING), "bfloat16")
    out.mkdir(parents=True, exist_ok=True)
    tokens = write_tokenizer(file, out, config.vocab_size)
    parameters = _write_weights(file, chosen, config, names, out, getattr(torch, kind))
    config.dtype = kind
    config.save_pretrained(out)
    notes: tuple[str, ...] = ()
    if not config.tie_word_embeddings:
        notes = ("its embedding and its output layer are two matrices in the file, and so they stay: an untied model",)
    return Converted(chosen.classes[1], parameters, tokens, kind, notes)


def _names(file: GgufFile, chosen: Architecture, config: object) -> dict[str, str]:
    """Of each tensor that is written: its name in transformers, in which the model has all and no others, in these
    shapes."""
    import transformers

    names: dict[str, str] = {}
    for tensor in file.tensors:
        if tensor == HEAD and getattr(config, "tie_word_embeddings", False):
            continue
        try:
            name = name_in_transformers(tensor, chosen)
        except KeyError:
            raise ConfigError(f"{file.path} has the tensor {tensor}, which the conversion does not know") from None
        if name is not None:
            names[tensor] = name
    with torch.device("meta"):
        model = getattr(transformers, chosen.classes[1])(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: file.tensors[tensor] for tensor, name in names.items()}
    if wrong := sorted(name for name in expected.keys() | found if expected.get(name) != found.get(name)):
        first = wrong[0]
        raise ConfigError(
            f"{file.path} does not hold the tensors of its metadata's model: {first} is {found.get(first, 'missing')} "
            f"in the file and {expected.get(first, 'missing')} in the model ({len(wrong)} such)"
        )
    return names


def _write_weights(
    file: GgufFile, chosen: Architecture, config: object, names: dict[str, str], out: Path, dtype: torch.dtype
) -> int:
    shapes = {name: file.tensors[tensor] for tensor, name in names.items()}
    described = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    with sharded_files(out, described, SHARD) as tensors:
        for tensor, name in names.items():
            shape = file.tensors[tensor]
            order = row_order(tensor, chosen, config, shape[0])
            offset = chosen.norm_offset if name.endswith("norm.weight") else 0.0
            for rows in row_parts(shape):
                values = file.rows(tensor, rows if order is None else order[rows]) - np.float32(offset)
                written = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
                if not bool(written.isfinite().all()):
                    raise ConfigError(f"{file.path}: {tensor} has numbers that are too large for {dtype}")
                tensors.write(name, rows.start * math.prod(shape[1:]), bytes_of(written))
    return sum(math.prod(shape) for shape in shapes.values())


def main(file: str, out: str, dtype: str) -> None:
    try:
        written = convert(Path(file), Path(out), dtype or None)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"skyrl model from-gguf: {error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(
        f"{out}: {written.architecture}, {written.parameters / 1e6:,.1f} million weights in {written.dtype}, "
        f"{written.tokens:,} tokens\n"
    )
    for note in written.notes:
        sys.stdout.write(f"{note}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
