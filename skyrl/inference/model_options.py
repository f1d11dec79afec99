"""What the base model's config.json means for vLLM: its options, its memory, and the longest sequence that it serves.

The longest context and the memory of adapters on experts follow from the sizes of the model and of the machine. All
processes of a server come to the same numbers: they follow from the memory of the machine, or the limit of its
container, and not from what is free at the moment.

Knows configurations. Imports neither vLLM nor torch, and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.base.config.backend import LoraConfig
from skyrl.base.config.pass_memory import Widths
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.model_files import experts_of, layers_with_experts
from skyrl.base.pictures.picture import MAX_PICTURES

_DELTA_RULE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
_MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w3", "w2")
CPU_LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "dense"),
    *(*_DELTA_RULE, *_LATENT, "in_proj"),
    *("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj"),
    *(*_MLP, "gate_up_proj", "fc1", "fc2"),
    "lm_head",
)
"""The layers that the trainer's adapters change, in all architectures."""
MIXTURE_LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *(*_DELTA_RULE, *_LATENT, "in_proj"),
    "lm_head",
)
"""Where adapters do not train experts. With more, vLLM keeps room for adapters on every expert, in each slot: many
times the memory of the rest."""
TRAINED_MIXTURE_LORA_TARGETS = (*MIXTURE_LORA_TARGETS, "experts", *_MLP)
"""The last ones are the MLPs of layers without experts, and shared experts."""

KEPT_ADAPTERS_BYTES = 10**9
CPU_KV_BYTES = 256 * 2**20
BLOCK_TOKENS = 32
"""The fewest tokens in a block of the cache that vLLM's attention on CPUs takes. vLLM's default there is 128, and it
finds only whole blocks in its prefix cache: a prompt shorter than a block would be found by nobody."""
_HYBRID_BLOCK_TOKENS, _LATENT_BLOCK_TOKENS = 128, 16
"""What vLLM starts from where layers keep states, and what it always takes for latent attention."""
_FOR_GPUS = ("kimi_linear", "inkling_text")
_GPT_OSS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def lora_targets(*, mixture: bool, trains_experts: bool, cuda: bool) -> Sequence[str] | None:
    """The layers that adapters may change; None for all that vLLM knows. A mixture whose config.json is not on this
    machine is not known to be one."""
    if mixture:
        return TRAINED_MIXTURE_LORA_TARGETS if trains_experts else MIXTURE_LORA_TARGETS
    if cuda:
        return None
    return (*CPU_LORA_TARGETS, "experts") if trains_experts else CPU_LORA_TARGETS


def text_options(whole: dict[str, Any]) -> dict[str, Any]:
    """For a model that sees, when it is used for text: vLLM loads no vision tower and makes no pictures to measure its
    memory. `whole`: all of config.json."""
    return {"language_model_only": True} if "vision_config" in whole else {}


def picture_options(*, cuda: bool) -> dict[str, Any]:
    """For a model that sees, when it gets pictures. vLLM would fetch pictures from any address; no domain ends in
    `.invalid`, so it takes only those that come with a request. On a CPU, vLLM makes no pictures to measure its memory
    at its start, because it has a fixed cache there, and keeps 1 GiB of pixels of the last pictures instead of 4."""
    options: dict[str, Any] = {
        "limit_mm_per_prompt": {"image": MAX_PICTURES, "video": 0},
        "allowed_media_domains": ["none.invalid"],
    }
    return options if cuda else options | {"skip_mm_profiling": True, "mm_processor_cache_gb": 1}


def quantization_of(whole: dict[str, Any]) -> str | None:
    """The format of a release with fewer bits, as all of its config.json names it."""
    found = whole.get("quantization_config") or whole.get("text_config", {}).get("quantization_config") or {}
    return found.get("quant_method")


def check_served(path: str, model: dict[str, Any], *, cuda: bool) -> None:
    """Raise ConfigError for models that vLLM would end at, after half a minute, or compute otherwise than the trainer:
    each with the setting in config.json that is in the way."""
    if "gpt_oss" in model.get("model_type", ""):
        for name, value in _GPT_OSS.items():
            if model.get(name, value) != value:
                raise ConfigError(f"base_model: {path}/config.json has {name} {model[name]}, and vLLM computes {value}")
    if has_short_convolution(model) and not model.get("tie_embedding", model.get("tie_word_embeddings", True)):
        raise ConfigError(f"base_model: {path}/config.json does not tie embeddings, and vLLM ties those of LFM2")
    if cuda:
        return
    kind = "inkling_text" if "rel_extent" in model else model.get("model_type")  # which a part of a model may lack
    if kind in _FOR_GPUS:
        raise ConfigError(f"base_model: {path}/config.json has model_type {kind}: vLLM needs a GPU")
    if model.get("index_topk") is not None:
        raise ConfigError(
            f"base_model: {path}/config.json has index_topk {model['index_topk']}: "
            "vLLM needs a GPU for sparse attention"
        )
    needed = {}
    if has_delta_rule(model):
        needed |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if has_latent_attention(model):
        needed |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    for name, value in needed.items():
        if model[name] != value:
            raise ConfigError(
                f"base_model: {path}/config.json has {name} {model[name]}, and on a CPU vLLM serves {value} alone"
            )


def has_delta_rule(model: dict[str, Any]) -> bool:
    """Whether some layers are a gated delta rule: Qwen3.5 and Qwen3-Next."""
    return "linear_key_head_dim" in model and "linear_value_head_dim" in model


def has_mamba(model: dict[str, Any]) -> bool:
    """Whether some layers are Mamba-2: Nemotron-H."""
    return "mamba_num_heads" in model


def has_short_convolution(model: dict[str, Any]) -> bool:
    """Whether some layers are a short convolution: LFM2."""
    return "conv_L_cache" in model


def keeps_states(model: dict[str, Any]) -> bool:
    """Whether some layers keep a state for each sequence in the place of keys and values."""
    return has_delta_rule(model) or has_mamba(model) or has_short_convolution(model)


def has_latent_attention(model: dict[str, Any]) -> bool:
    """Whether attention keeps one latent vector for each token: DeepSeek and Kimi-K2."""
    return "kv_lora_rank" in model and "qk_rope_head_dim" in model


def cpu_options(
    model: dict[str, Any], quantization: str | None, length: int, sequences: int, given_block: Any = None
) -> tuple[dict[str, Any], int]:
    """vLLM's options on a CPU for sequences of `length` tokens, of which `sequences` run at a time; and the size of the
    key-value cache in GiB. The kernels of the delta rule and of quantized weights take bfloat16 alone. A prefix cache
    of states would need prompts that are split, which a CPU cannot do with seeds. `given_block`: the operator's own
    `block_size`; None for the one that is chosen here."""
    tokens = given_block if isinstance(given_block, int) and given_block > 0 else BLOCK_TOKENS
    states = keeps_states(model)
    blocks, kv_gib = _kv_cache(model, length, sequences, tokens)
    return {
        "dtype": "bfloat16" if has_delta_rule(model) or quantization is not None else "float32",
        "block_size": None if states or has_latent_attention(model) else tokens,
        "enable_prefix_caching": False if states else None,
        "num_gpu_blocks_override": blocks,
    }, kv_gib


def slot_features(model: dict[str, Any]) -> int:
    """The numbers of an adapter of rank 1 that a slot on a CPU has once more: those of the output layer. Other layers
    compute with the adapter itself (`vllm_plugin.adapters_cpu`). 0 where config.json lacks a size."""
    return model["hidden_size"] + model["vocab_size"] if {"hidden_size", "vocab_size"} <= model.keys() else 0


def adapter_features(model: dict[str, Any]) -> int:
    """The numbers of an adapter of rank 1: those of the output layer, and in a dense model those of its linear layers.
    0 where config.json lacks a size."""
    widths = Widths.of(model)
    return slot_features(model) if widths is None else widths.adapter_numbers(1)


def kept_adapters(model: dict[str, Any], lora: LoraConfig) -> int:
    """How many adapters vLLM on a CPU keeps, also those that nobody samples from: `max_cpu_loras`; if that is not set,
    of a dense model those of the highest rank that fit into a gigabyte, but at least `max_loras`."""
    if "max_cpu_loras" in lora.model_fields_set or Widths.of(model) is None:
        return lora.max_cpu_loras
    fitting = int(KEPT_ADAPTERS_BYTES // (4 * lora.max_lora_rank * adapter_features(model)))
    return max(lora.slots, min(lora.max_cpu_loras, fitting))


def kv_cache_bytes(model: dict[str, Any], length: int, sequences: int) -> float:
    """The size of the key-value cache of vLLM on a CPU, as `cpu_options` asks for it."""
    blocks, kv_gib = _kv_cache(model, length, sequences)
    return kv_gib * 2**30 if blocks is None else blocks * _blocks(model, length, BLOCK_TOKENS)[0]


def _kv_cache(
    model: dict[str, Any], length: int, sequences: int, block_tokens: int = BLOCK_TOKENS
) -> tuple[int | None, int]:
    """The number of blocks of the key-value cache, and its size in GiB. With None, vLLM divides the GiB into blocks and
    touches all of that memory.

    The cache holds all `sequences` at full length if they fit into 256 MiB, else as many blocks as fit. If fewer than 8
    sequences fit, the cache has whole GiB for 8: at most 4, or enough for one sequence if that is more.
    """
    try:
        block_bytes, per_sequence = _blocks(model, length, block_tokens)
    except KeyError:
        return None, 4
    fitting = CPU_KV_BYTES // block_bytes
    if fitting < 8 * per_sequence:
        of_one = per_sequence * block_bytes / 2**30
        return None, max(math.ceil(of_one), min(4, math.ceil(8 * of_one)))
    return min(fitting, per_sequence * sequences) + 1, 1


def _blocks(model: dict[str, Any], length: int, block_tokens: int) -> tuple[int, int]:
    """The bytes of a block, and how many blocks a sequence has. `block_tokens` counts where vLLM does not choose the
    block itself. Raises KeyError if config.json lacks a size."""
    layers = model["num_hidden_layers"]
    if has_latent_attention(model):
        width = model["kv_lora_rank"] + model["qk_rope_head_dim"]
        return 4 * _LATENT_BLOCK_TOKENS * layers * width, math.ceil(length / _LATENT_BLOCK_TOKENS)
    heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    if keeps_states(model):
        block_tokens = _HYBRID_BLOCK_TOKENS
    attention = 2 * block_tokens * heads * width
    per_sequence = math.ceil(length / block_tokens)
    if has_delta_rule(model):
        attention *= 2
        full = model.get("layer_types", ()).count("full_attention")
        full = full or layers // (model.get("full_attention_interval") or 4)
        state = 4 * model["linear_num_value_heads"] * model["linear_key_head_dim"] * model["linear_value_head_dim"]
    elif has_mamba(model):
        attention *= 4
        kinds = [*(model.get("layers_block_type") or model["hybrid_override_pattern"])]
        full = sum(kinds.count(name) for name in ("attention", "full_attention", "*"))
        layers = full + sum(kinds.count(name) for name in ("mamba", "linear_attention", "M"))
        state = 4 * model["mamba_num_heads"] * model["mamba_head_dim"] * model["ssm_state_size"]
    elif has_short_convolution(model):
        attention *= 4
        full = model["layer_types"].count("full_attention") if "layer_types" in model else len(model["full_attn_idxs"])
        state = 4 * model["hidden_size"] * (model["conv_L_cache"] - 1)
    else:
        return 4 * layers * attention, per_sequence
    # vLLM keeps a layer's state in one block, which is as large for attention. Layers share blocks in groups, each with
    # as many layers as have attention.
    full = max(1, full)
    return full * max(state, attention), per_sequence + math.ceil(layers / full)


LEAST, MOST = 4_096, 32_768
"""In tokens. Coding agents begin with 8,500 to 27,000."""
BATCH = 8_192
"""vLLM computes so many tokens at once at least, or one prompt of the longest length: prompts are not split on a
CPU."""
SHARE = 1 / 3
"""The part of the machine's memory that cache and longest prompt may take, if they take more than with LEAST tokens."""
_WIDTHS = 8
"""Numbers of the hidden width that vLLM keeps for each token of a prompt, besides three of an MLP's width."""


def longest_context(model: Mapping[str, Any], sequences: int, memory: float) -> int:
    """A power of two between LEAST and MOST, or the model's own length if that is less. `model` is the text model's
    part of config.json, `sequences` how many run at a time, `memory` the bytes of the machine."""
    own = model.get("max_position_embeddings")
    if own is None:
        return LEAST
    least = _bytes(model, min(LEAST, own), sequences)
    length = MOST
    while length > LEAST:
        chosen = min(length, own)
        if _bytes(model, chosen, sequences) <= max(least, memory * SHARE):
            return chosen
        length //= 2
    return min(LEAST, own)


def longest_step(length: int) -> float:
    """How many times as long as a batch of BATCH tokens a prompt of `length` takes at most: attention grows with the
    square."""
    return max(1.0, length / BATCH) ** 2


def _bytes(model: Mapping[str, Any], length: int, sequences: int) -> float:
    """The cache, and what the tokens of a batch keep."""
    return kv_cache_bytes(dict(model), length, sequences) + batch_bytes(model, max(BATCH, length))


def batch_bytes(model: Mapping[str, Any], tokens: int) -> float:
    """What the tokens that vLLM computes at once keep meanwhile, in float32."""
    hidden = model.get("hidden_size", 0)
    return 4.0 * tokens * (_WIDTHS * hidden + 3 * (model.get("intermediate_size") or 4 * hidden))


_MUCH = 16e9
"""Bytes of main memory."""


def room_bytes(config: ServerConfig, model: dict[str, Any]) -> int:
    """What each GPU keeps for adapters on experts, in bfloat16: in each of `max_loras` slots, matrices of rank
    `max_lora_rank` for three projections of every expert. `model`: the text model's part of config.json. With tensor
    parallelism a GPU has all of what is as wide as the hidden states, and its part of what is as wide as an expert.
    0 if adapters do not change experts, or config.json lacks a size."""
    lora, inference = config.backend_config.lora, config.backend_config.inference
    return lora.slots * _adapter_bytes(config, model, inference.tensor_parallel_size)


def _adapter_bytes(config: ServerConfig, model: dict[str, Any], parallel: int = 1) -> int:
    """The part on experts of an adapter of `max_lora_rank`, on one of `parallel` GPUs. 0 as for `room_bytes`."""
    lora = config.backend_config.lora
    if lora.train_mlp_of_mixtures != "train" or config.full_finetuning:
        return 0
    try:
        size = model.get("moe_intermediate_size") or model["intermediate_size"]
        layers, width = len(layers_with_experts(model)), model["hidden_size"] + size / parallel
    except KeyError:
        return 0
    return int(2 * layers * experts_of(model) * lora.max_lora_rank * 3 * width)


def host_memory_warning(config: ServerConfig, model: dict[str, Any]) -> str | None:
    """What to set if vLLM may keep much of the host's memory for adapters on experts; else None."""
    adapters = config.backend_config.lora.max_cpu_loras
    room = adapters * _adapter_bytes(config, model)
    if room < _MUCH:
        return None
    return (
        f"trainer.policy.model.lora.max_cpu_loras: {adapters} adapters on the experts of the base model take up to "
        f"{room / 1e9:.3g} GB of the host's memory, in each process of vLLM that has a GPU: lower it if there is less"
    )


def check_layers(config: ServerConfig, model: dict[str, Any]) -> None:
    """Raise ConfigError for a mixture with adapters that vLLM does not load: it takes those on the MLPs of layers
    without experts only if `mlp_only_layers` names some, and none on experts of Hunyuan's first mixtures."""
    step, why = model.get("decoder_sparse_step") or 1, None
    if step > 1 and not model.get("mlp_only_layers"):
        why = f"has layers without experts (decoder_sparse_step {step}), and vLLM loads no adapters on their MLPs"
    elif model.get("model_type") == "hunyuan_v1_moe":
        why = "is computed by transformers' class in vLLM, which loads no adapters on its experts"
    if why is not None and config.backend_config.lora.train_mlp_of_mixtures == "train":
        raise ConfigError(
            f"base_model: {config.base_model_path} {why}: set trainer.policy.model.lora.train_mlp_of_mixtures to "
            "leave_out or refuse"
        )


def memory_hint(config: ServerConfig, model: dict[str, Any], sentence: str) -> str:
    """What to set if `sentence`, the cause of vLLM's end, is about memory, and vLLM keeps some for adapters on experts;
    else empty."""
    room = room_bytes(config, model)
    if not room or "memory" not in sentence.lower():
        return ""
    lora = config.backend_config.lora
    return (
        f"; vLLM keeps {room / 1e9:.3g} GB for adapters on the experts of the base model: lower "
        f"trainer.policy.model.lora.max_loras ({lora.max_loras}) or max_lora_rank ({lora.max_lora_rank}), or set "
        "train_mlp_of_mixtures to leave_out or refuse, which keeps none, and adapters that train experts already are "
        "then not sampled"
    )
