"""vLLM's options by the architecture of the base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.inference.model_options import CPU_KV_BYTES, cpu_options, kv_cache_bytes
from skyrl.inference.vllm_command import vllm_spec

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64}
DELTA_RULE: dict[str, Any] = {
    **SIZES,
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LATENT = {**SIZES, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 8}
GPT_OSS = {**SIZES, "model_type": "gpt_oss", "num_local_experts": 4, "swiglu_limit": 7.0}


def _argv(directory: Path, config: dict[str, Any], *, cuda: bool = False) -> tuple[str, ...]:
    (directory / "config.json").write_text(json.dumps(config))
    return vllm_spec(load_config({"base_model": str(directory)}), 9123, "secret", cuda=cuda).argv


def _on_cpu(model: dict[str, Any], length: int, sequences: int) -> tuple[dict[str, Any], int]:
    return cpu_options(model, None, length, sequences)


def _after(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_the_delta_rule_is_served_in_bfloat16_and_without_a_prefix_cache_on_a_cpu(tmp_path: Path) -> None:
    argv = _argv(tmp_path, DELTA_RULE)
    assert _after(argv, "--dtype") == "bfloat16"
    assert "--no-enable-prefix-caching" in argv
    assert {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"} <= set(argv)
    assert "--no-enable-prefix-caching" not in _argv(tmp_path, DELTA_RULE, cuda=True)
    assert _after(_argv(tmp_path, SIZES), "--dtype") == "float32"


def test_quantized_releases_are_served_in_bfloat16_on_a_cpu(tmp_path: Path) -> None:
    int4 = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    assert _after(_argv(tmp_path, SIZES | int4), "--dtype") == "bfloat16"
    seeing = {"model_type": "kimi_k25", "vision_config": {}, "text_config": SIZES | int4}
    assert _after(_argv(tmp_path, seeing), "--dtype") == "bfloat16"


def test_a_block_of_the_delta_rules_cache_holds_a_state_and_a_sequence_has_one_of_each_group() -> None:
    # One of four layers has attention: groups of one layer. A state is 4 heads * 128 * 128 * 4 bytes = 262,144.
    options, gib = _on_cpu(DELTA_RULE, 256, 16)
    assert options["num_gpu_blocks_override"] == 16 * (2 + 4) + 1
    assert gib == 1
    assert _on_cpu(DELTA_RULE, 256, 10_000)[0]["num_gpu_blocks_override"] == CPU_KV_BYTES // 262_144 + 1
    by_interval = {name: value for name, value in DELTA_RULE.items() if name != "layer_types"}
    assert _on_cpu(by_interval | {"full_attention_interval": 4}, 256, 16) == (options, gib)


def test_mamba_has_no_prefix_cache_on_a_cpu_and_blocks_of_a_state(tmp_path: Path) -> None:
    mamba = SIZES | {"model_type": "nemotron_h", "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128}
    by_name = mamba | {"layers_block_type": ["mamba", "moe", "mamba", "attention"]}
    argv = _argv(tmp_path, by_name)
    assert _after(argv, "--dtype") == "float32"
    assert "--no-enable-prefix-caching" in argv
    # A state is 64 * 64 * 128 * 4 bytes = 2 MiB; the three layers with a cache are in groups of one.
    expected = 2 * (2 + 3) + 1
    assert _on_cpu(by_name, 256, 2)[0]["num_gpu_blocks_override"] == expected
    assert _on_cpu(mamba | {"hybrid_override_pattern": "MEM*"}, 256, 2)[0]["num_gpu_blocks_override"] == expected
    assert _on_cpu(mamba, 256, 2) == _on_cpu({"mamba_num_heads": 64}, 256, 2)  # nothing tells the layers


def test_latent_attention_has_small_blocks(tmp_path: Path) -> None:
    assert _on_cpu(LATENT, 64, 8)[0]["num_gpu_blocks_override"] == 8 * 4 + 1
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "experts"} <= set(_argv(tmp_path, LATENT))


def test_blocks_of_the_cache_are_the_smallest_that_vllm_takes_on_a_cpu(tmp_path: Path) -> None:
    assert _after(_argv(tmp_path, SIZES), "--block-size") == "32"
    block = 2 * 4 * 32 * 2 * 32 * 4  # keys and values of 4 bytes, 32 tokens, 2 heads of 32, 4 layers
    options, _ = _on_cpu(SIZES, 256, 4)
    assert options["num_gpu_blocks_override"] == 4 * 256 // 32 + 1
    assert kv_cache_bytes(SIZES, 256, 4) == (4 * 256 // 32 + 1) * block
    assert "--block-size" not in _argv(tmp_path, SIZES, cuda=True)


def test_models_with_states_and_latent_attention_keep_vllms_blocks(tmp_path: Path) -> None:
    mamba = SIZES | {"model_type": "nemotron_h", "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128}
    for model in (DELTA_RULE, mamba, LATENT):
        assert "--block-size" not in _argv(tmp_path, model)


def test_an_operators_own_block_is_taken_and_the_cache_has_as_many_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"max_position_embeddings": 256}))
    key = "generator.inference_engine.engine_init_kwargs"
    own = {"base_model": str(tmp_path), "backend_config": {key: {"block-size": 128}}}
    argv = vllm_spec(load_config(own), 9123, "secret", cuda=False).argv
    assert argv.count("--block-size") == 1
    assert _after(argv, "--block-size") == "128"
    assert _after(argv, "--num-gpu-blocks-override") == str(256 * 256 // 128 + 1)


def test_a_model_that_sees_is_served_for_text(tmp_path: Path) -> None:
    seeing = {"model_type": "qwen3_5", "text_config": DELTA_RULE, "vision_config": {"depth": 2}}
    argv = _argv(tmp_path, seeing)
    assert "--language-model-only" in argv
    assert _after(argv, "--dtype") == "bfloat16"
    assert "--language-model-only" not in _argv(tmp_path, DELTA_RULE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DELTA_RULE | {"linear_key_head_dim": 64}, "linear_key_head_dim 64, and on a CPU vLLM serves 128 alone"),
        (LATENT | {"kv_lora_rank": 256}, "kv_lora_rank 256, and on a CPU vLLM serves 512 alone"),
        (SIZES | {"model_type": "kimi_linear"}, "model_type kimi_linear: vLLM needs a GPU"),
    ],
)
def test_what_vllm_serves_on_gpus_alone_is_refused_on_a_cpu(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"base_model: .*config.json has {words}"):
        _argv(tmp_path, config)
    _argv(tmp_path, config, cuda=True)


@pytest.mark.parametrize("cuda", [False, True])
def test_an_activation_of_gpt_oss_that_vllm_computes_otherwise_is_refused(tmp_path: Path, cuda: bool) -> None:
    _argv(tmp_path, GPT_OSS, cuda=cuda)
    with pytest.raises(ConfigError, match=r"config.json has swiglu_limit 5.0, and vLLM computes 7.0"):
        _argv(tmp_path, GPT_OSS | {"swiglu_limit": 5.0}, cuda=cuda)
