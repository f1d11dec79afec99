"""Tiny models of the architectures in docs/reference/architectures.md, made on the spot with random weights.

The shapes suit vLLM's kernels for CPUs. Weights are large enough for soft-capping, windows and norms to show in logits.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from skyrl.base.pictures.vision import SEES
from skyrl.trainer.experts.routing import CORRECTIONS
from skyrl.trainer.model.loading import SEEING, model_class

VOCAB, CONTEXT, WINDOW = 128, 128, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WHOLE: dict[str, Any] = {"hidden_size": 128, "head_dim": None}
"""Families whose heads divide the hidden size."""
_MIXED = ["sliding_attention", "full_attention"]
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_DELTA_RULE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4,
}
"""vLLM's kernel for CPUs takes heads of 128."""
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": SHAPE["hidden_size"],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
"""The vision tower of models that see. The numbers above are then those of their text part."""
_LAYERS = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
VISION_OF: dict[str, dict[str, Any]] = {
    "gemma4": {**_LAYERS, "intermediate_size": 48, "num_key_value_heads": 2, "position_embedding_size": 16},
    "mistral3": {**_LAYERS, "intermediate_size": 48, "image_size": 32, "head_dim": 16},
    "kimi_k25": {**_LAYERS, "intermediate_size": 48},
    "inkling_mm_model": {"n_layers": 3, "patch_size": 2, "temporal_patch_size": 2},
    "nemotron_h_omni": {**_LAYERS, "image_size": 32, "max_img_size": 64, "video_temporal_patch_size": 2},
    "qwen3_5": {**VISION, "deepstack_visual_indexes": []},
    "qwen3_5_moe": {**VISION, "deepstack_visual_indexes": []},
}
"""The vision towers that have other settings. Qwen3.5's has no layers for deepstack: vLLM would make the indexes into
layers, and not find their weights."""
IMAGE_TOKEN = 123
PICTURE_TOKENS: dict[str, int] = {
    "vision_start_token_id": 121,
    "vision_end_token_id": 122,
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 124,
}
"""Of models whose pictures are taken. The random texts of tests have lower ids."""
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 2 * 32**2, "longest_edge": 12 * 32**2},
    "patch_size": VISION["patch_size"],
    "temporal_patch_size": 2,
    "merge_size": VISION["spatial_merge_size"],
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Their image processor, as releases of Qwen3-VL have it. A token is 32 x 32 pixels; a picture has 2 to 12 tokens."""
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_GEMMA_4: dict[str, Any] = {
    "tie_word_embeddings": True,
    "layer_types": _MIXED,
    "sliding_window": WINDOW,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 3.0,
}
_PER_LAYER: dict[str, Any] = {
    **_GEMMA_4,
    "num_hidden_layers": 4,
    "layer_types": _MIXED * 2,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
"""The small models of Gemma 4: embeddings for each layer, and layers that read keys and values of earlier ones."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **_WHOLE},
    "qwen2.5": {"model_type": "qwen2", "rope_parameters": _YARN, **_WHOLE},
    "qwen3": {"model_type": "qwen3"},
    "llama-3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma-2": {
        "model_type": "gemma2",
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 48,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma-3": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 48,
    },
    "gemma-4": {"model_type": "gemma4_text", **_PER_LAYER},
    "gemma-4 that sees": {"model_type": "gemma4", **_PER_LAYER, "pad_token_id": 0},
    "ministral-3": {
        "model_type": "mistral3",
        "text_model_type": "ministral3",
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    },
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5, **_WHOLE},
    "phi-3": {"model_type": "phi3", "sliding_window": WINDOW, **_WHOLE},
    "phi-4-mini": {"model_type": "phi3", "partial_rotary_factor": 0.75, "tie_word_embeddings": True, **_WHOLE},
    "olmo": {"model_type": "olmo", "clip_qkv": 1.5, **_WHOLE},
    "olmo-2": {"model_type": "olmo2", **_WHOLE},
    "olmo-3": {"model_type": "olmo3", "sliding_window": WINDOW, "layer_types": _MIXED, **_WHOLE},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.5,
        **_WHOLE,
    },
    "command-r": {
        "model_type": "cohere",
        "logit_scale": 0.25,
        "use_qk_norm": True,
        "tie_word_embeddings": True,
        **_WHOLE,
    },
    "command-a": {
        "model_type": "cohere2",
        "logit_scale": 0.25,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "tie_word_embeddings": True,
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": False, **_WHOLE},
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
        **_WHOLE,
    },
    "qwen3.5": {"model_type": "qwen3_5_text", **_DELTA_RULE},
    "qwen3.5 that sees": {"model_type": "qwen3_5", **_DELTA_RULE, "rope_parameters": _MROPE},
    "qwen3-vl": {"model_type": "qwen3_vl", "rope_parameters": _MROPE},
}
"""Those that adapters can train, by the family's name in the documentation."""

OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "init_std": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Learned positions."""

_SHARED: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""Experts of the hybrids of Qwen, with a shared expert and its gate."""

_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
"""Latent attention of DeepSeek's kind, and a first layer without experts."""

_INDEXER: dict[str, Any] = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 32}
"""Attention to few tokens. With many heads no two scores are equal, which would be those of tokens that no head's query
points at."""

_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "chunk_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
"""Each kind of layers of Nemotron-3."""

_SCALED: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Experts of DeepSeek's kind: sigmoids, chosen in groups, with a shared expert."""

_MISTRAL_4: dict[str, Any] = {
    **_LATENT,
    **{name: value for name, value in _SCALED.items() if name not in ("topk_method", "scoring_func")},
    "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}

_RANDOM_TOO = (
    *("experts.gate_up_proj_bias", "experts.down_proj_bias", *CORRECTIONS),
    *("index_kpool_compress_ape", "index_kpool_compress_gate"),
)
"""Tensors to which transformers gives equal numbers at first."""

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe",
        "rope_parameters": _MROPE,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-next": {"model_type": "qwen3_next", **_DELTA_RULE, **_SHARED},
    "qwen3.5-moe": {"model_type": "qwen3_5_moe_text", **_DELTA_RULE, **_SHARED},
    "qwen3.5-moe that sees": {"model_type": "qwen3_5_moe", **_DELTA_RULE, **_SHARED, "rope_parameters": _MROPE},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "rope_parameters": _YARN,
    },
    "deepseek-v3": {"model_type": "deepseek_v3", **_LATENT, **_SCALED},
    "kimi-k2.5": {"model_type": "kimi_k25", **_LATENT, **_SCALED},
    "glm-4.5": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        **_SCALED,
    },
    "glm-4.7-flash": {"model_type": "glm4_moe_lite", **_LATENT, **_SCALED},
    "gemma-4-moe": {
        "model_type": "gemma4_text",
        **_GEMMA_4,
        "tie_word_embeddings": False,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "hunyuan-moe": {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2, 2]},
    "hunyuan-3": {
        "model_type": "hy_v3",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "mistral-4": {"model_type": "mistral4", **_MISTRAL_4},
    "mistral-4 that sees": {"model_type": "mistral3", "text_model_type": "mistral4", **_MISTRAL_4},
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "use_qk_norm": True,
    },
    "nemotron-h": {"model_type": "nemotron_h", **_MAMBA, **_SCALED},
    "nemotron-h that sees": {"model_type": "nemotron_h_omni", **_MAMBA, **_SCALED},
    "inkling": {
        "model_type": "inkling_mm_model",
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "sliding_window_size": WINDOW,
        "d_rel": 4,
        "rel_extent": 12,
        "log_scaling_n_floor": 16,
        "log_scaling_alpha": 0.5,
        "logits_mup_width_multiplier": 2.0,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "route_scale": 2.0,
    },
    "lfm2-moe": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        **_WHOLE,
    },
    "kimi-linear": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "linear_num_heads": 2,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        **_SCALED,
        "num_experts": 8,
    },
    "deepseek-v3.2": {"model_type": "deepseek_v32", **_LATENT, **_SCALED, **_INDEXER},
    "glm-5": {"model_type": "glm_moe_dsa", **_LATENT, **_SCALED, **_INDEXER, "index_topk_pattern": "FSF"},
    "glm-5.3-flash": {
        "model_type": "glm5_next",
        **_LATENT,
        **_SCALED,
        **_INDEXER,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "qk_rope_head_dim": 0,
        "linear_num_heads": 2,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "index_kpool": 4,
        "hc_mult": 2,
        "swiglu_limit": 1.5,
    },
}
"""Mixtures of experts that adapters can train. Some have a dense layer: PEFT leaves out its MLP in the first one."""


def make_family(name: str, directory: Path, **changed: Any) -> str:
    """Save a random float32 model of the family, with `changed` settings. Norm weights and biases are random too.
    Returns its path."""
    return save_random({**SHAPE, **{**FAMILIES, **MIXTURES}[name], **changed}, directory / name)


def as_dense(path: str, directory: Path) -> str:
    """Save a model with latent and sparse attention as DeepSeek-V3, which attends to all tokens: the same weights
    without those of indexers. Returns its path."""
    directory.mkdir(parents=True)
    tensors = load_file(Path(path) / "model.safetensors")
    others = {name: each for name, each in tensors.items() if ".indexer." not in name}
    save_file(others, directory / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((Path(path) / "config.json").read_text())
    for name in [*_OF_SPARSE, *(name for name in described if name.startswith("index"))]:
        described.pop(name, None)
    described |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(described))
    return str(directory)


_OF_SPARSE = ("mlp_layer_types", "layer_types")
"""Settings of models with sparse attention, beside those of indexers, that DeepSeek-V3 does not have."""


def save_random(settings: dict[str, Any], path: Path) -> str:
    """Save a random model of these settings of transformers' configuration, `model_type` among them, and for some that
    see `text_model_type`. `head_dim` may be None: some configurations have no such setting."""
    # A copy, because configurations write into the dictionaries that they get.
    given = copy.deepcopy({name: value for name, value in settings.items() if name != "model_type"})
    if "text_model_type" in given:
        given["model_type"] = given.pop("text_model_type")
    if given.get("head_dim", 0) is None:
        del given["head_dim"]
    model_type = settings["model_type"]
    if model_type in SEEING:
        tied = given.get("tie_word_embeddings", False)
        vision = VISION_OF.get(model_type, VISION)
        ids = PICTURE_TOKENS if model_type in SEES else {}
        towers: dict[str, Any] = {"vision_config": vision}
        if model_type == "inkling_mm_model":
            towers["audio_config"] = {"n_mel_bins": 4, "mel_vocab_size": 8}
        config = AutoConfig.for_model(model_type, text_config=given, **towers, tie_word_embeddings=tied, **ids)
    else:
        config = AutoConfig.for_model(model_type, **given)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = model_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(_RANDOM_TOO):
                    tensor.normal_(0, 0.15)
                if name.endswith("layer_scalar"):
                    tensor.normal_(1, 0.1)
    model.save_pretrained(path)
    if model_type in SEES:
        (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return str(path)
