"""What the base model's config.json means for vLLM: its options, its context, and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig, vision_of
from skyrl.base.config.several import base_models_of
from skyrl.base.pictures.picture import MAX_PICTURES
from skyrl.base.pictures.vision import SEES, NoVision, VisionConfig
from skyrl.inference import vllm_command
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.model_options import CPU_KV_BYTES, cpu_options, kv_cache_bytes, longest_context
from skyrl.inference.vllm_command import context_length, context_sentence, vllm_spec
from skyrl.sampling.job import MAX_TOPK
from tests.families import PROCESSOR

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


def test_short_convolutions_have_no_prefix_cache_on_a_cpu_and_blocks_of_attention(tmp_path: Path) -> None:
    """One layer of three has keys and values, 128 tokens in a block; a state of the others takes a block, too."""
    by_kind = SIZES | {"model_type": "lfm2", "conv_L_cache": 3, "num_hidden_layers": 3}
    by_kind |= {"layer_types": ["conv", "full_attention", "conv"]}
    by_number = {name: value for name, value in by_kind.items() if name != "layer_types"} | {"full_attn_idxs": [1]}
    options, _ = _on_cpu(by_kind, 256, 2)
    assert options["dtype"] == "float32"
    assert options["enable_prefix_caching"] is False
    assert options["num_gpu_blocks_override"] == 2 * (2 + 3) + 1
    assert _on_cpu(by_number, 256, 2)[0] == options
    _argv(tmp_path, by_kind)
    for untied in ("tie_embedding", "tie_word_embeddings"):
        with pytest.raises(ConfigError, match="base_model: .*does not tie embeddings, and vLLM ties those of LFM2"):
            _argv(tmp_path, by_kind | {untied: False}, cuda=True)


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
        (LATENT | {"index_topk": 2048}, "index_topk 2048: vLLM needs a GPU for sparse attention"),
        (SIZES | {"rel_extent": 1024}, "model_type inkling_text: vLLM needs a GPU"),
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


GIB = 2.0**30
SMALL = {
    "max_position_embeddings": 32_768,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4_864,
}
"""As Qwen2.5-0.5B: 24 kB of cache for a token."""
WIDE = SMALL | {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2_560}
"""As Qwen3-4B: 288 kB of cache for a token."""


@pytest.mark.parametrize(
    ("model", "memory", "expected"),
    [
        (SMALL, 24 * GIB, 32_768),
        (SMALL, 16 * GIB, 16_384),
        (SMALL, 2 * GIB, 4_096),
        (SMALL, 8 * GIB, 8_192),
        (SMALL | {"max_position_embeddings": 8_192}, 24 * GIB, 8_192),
        (SMALL | {"max_position_embeddings": 20_000}, 24 * GIB, 20_000),
        (SMALL | {"max_position_embeddings": 2_048}, 2 * GIB, 2_048),
        (SMALL | {"max_position_embeddings": 131_072}, 512 * GIB, 32_768),
        (WIDE, 24 * GIB, 16_384),
        (WIDE, 64 * GIB, 32_768),
        ({}, 512 * GIB, 4_096),
    ],
)
def test_the_context_is_as_long_as_the_memory_easily_holds(model: dict[str, Any], memory: float, expected: int) -> None:
    assert longest_context(model, 256, memory) == expected


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.setattr(vllm_command, "limit_bytes", lambda: 24 * GIB)
    return tmp_path


def test_the_start_says_the_context_and_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"base_model": str(directory)})
    assert context_length(config, cuda=False) == 32_768
    assert context_sentence(config, cuda=False) == "context: sequences of up to 32768 tokens, the model's own length"
    key = "generator.inference_engine.max_model_len"
    given = load_config({"base_model": str(directory), "backend_config": {key: 100}})
    assert context_sentence(given, cuda=False) == f"context: sequences of up to 100 tokens, as {key} says"
    monkeypatch.setattr(vllm_command, "limit_bytes", lambda: 4 * GIB)
    assert context_sentence(config, cuda=False) == (
        "context: sequences of up to 4096 tokens, what this machine's memory easily holds of the model's 32768; "
        f"{key} sets another length"
    )
    assert context_sentence(config, cuda=True) == ""


def test_vllms_that_share_the_memory_or_run_elsewhere_serve_4096_tokens(directory: Path) -> None:
    key = "generator.inference_engine.num_engines"
    several = load_config({"base_models": [{"base_model": str(directory)}, {"base_model": "tiny"}]})
    for config in (
        base_models_of(several)[0],
        load_config({"base_model": str(directory), "backend_config": {key: 2}}),
        load_config({"base_model": str(directory), "ray_address": "local"}),
    ):
        assert context_length(config, cuda=False) == 4_096


def test_a_system_that_does_not_tell_its_memory_serves_what_costs_no_more(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> float:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(vllm_command, "limit_bytes", unknown)
    assert context_length(load_config({"base_model": str(directory)}), cuda=False) == 4_096


def test_a_prompt_of_the_longest_length_counts_as_no_hanging_engine(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    key = "generator.inference_engine.step_timeout_s"
    longest = Vllm(load_config({"base_model": str(directory)}), "")
    assert longest.probes["/is_sleeping"] == 16 * 300
    given = Vllm(load_config({"base_model": str(directory), "backend_config": {key: 100}}), "")
    assert given.probes["/is_sleeping"] == 100
    assert Vllm(load_config({}), "").probes["/is_sleeping"] == 300
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert longest.probes["/is_sleeping"] == 300


OPTIONS = "generator.inference_engine.engine_init_kwargs"
TEXT = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128, "max_position_embeddings": 1024}


def model(directory: Path, model_type: str = "qwen3_vl", *, processor: bool = True) -> str:
    config = {"model_type": model_type, "vision_config": {"depth": 2}, "text_config": TEXT, "image_token_id": 9}
    (directory / "config.json").write_text(json.dumps(config))
    if processor:
        (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return str(directory)


def config_of(path: str, **options: Any) -> ServerConfig:
    return load_config({"base_model": path, "backend_config": {OPTIONS: options}})


def argv(config: ServerConfig, *, cuda: bool = False) -> tuple[str, ...]:
    return vllm_spec(config, 9123, "secret", cuda=cuda).argv


def value(words: tuple[str, ...], name: str) -> str:
    return words[words.index(f"--{name}") + 1]


def sight(config: ServerConfig) -> VisionConfig:
    found = vision_of(config)
    assert isinstance(found, VisionConfig)
    return found


def blind(config: ServerConfig) -> NoVision:
    found = vision_of(config)
    assert isinstance(found, NoVision)
    return found


@pytest.mark.parametrize("model_type", sorted(SEES))
@pytest.mark.parametrize("cuda", [False, True])
def test_vllm_gets_pictures_and_fetches_none(tmp_path: Path, model_type: str, cuda: bool) -> None:
    config = config_of(model(tmp_path, model_type))
    words = argv(config, cuda=cuda)
    assert "--language-model-only" not in words
    assert "--enable-scale-out" in words
    assert json.loads(value(words, "limit-mm-per-prompt")) == {"image": MAX_PICTURES, "video": 0}
    assert value(words, "allowed-media-domains").endswith(".invalid")
    assert ("--skip-mm-profiling" in words) == ("--mm-processor-cache-gb" in words) == (not cuda)
    assert sight(config).image_token_id == 9


def test_vllm_gives_one_more_logprob_than_clients_may_ask_for(tmp_path: Path) -> None:
    """Its route for pictures lists the sampled token first."""
    assert value(argv(config_of(model(tmp_path))), "max-logprobs") == str(MAX_TOPK + 1)


@pytest.mark.parametrize("name", ["language_model_only", "language-model-only"])
def test_an_operator_can_switch_pictures_off(tmp_path: Path, name: str) -> None:
    config = config_of(model(tmp_path), **{name: True})
    words = argv(config)
    assert words.count("--language-model-only") == 1
    assert "--limit-mm-per-prompt" not in words
    assert "--allowed-media-domains" not in words
    assert "the operator has switched images off" in str(blind(config))
    assert sight(config_of(str(tmp_path), **{name: False}))


def test_an_operators_own_bounds_come_last(tmp_path: Path) -> None:
    words = argv(config_of(model(tmp_path), limit_mm_per_prompt={"image": 2}, mm_processor_cache_gb=4))
    assert json.loads(value(words, "limit-mm-per-prompt")) == {"image": 2}
    assert value(words, "mm-processor-cache-gb") == "4"


@pytest.mark.parametrize(
    ("model_type", "processor", "reason"),
    [
        ("kimi_k25", True, "takes no pictures for models of type kimi_k25"),
        ("qwen3_vl", False, "are not on this machine"),
    ],
)
def test_models_whose_pictures_are_not_taken_are_served_for_text(
    tmp_path: Path, model_type: str, processor: bool, reason: str
) -> None:
    config = config_of(model(tmp_path, model_type, processor=processor))
    words = argv(config)
    assert "--language-model-only" in words
    assert "--limit-mm-per-prompt" not in words
    assert reason in str(blind(config))


def test_a_server_of_others_is_expected_to_see(tmp_path: Path) -> None:
    external = {"external_inference_url": "http://127.0.0.1:1"}
    config = load_config(
        {"base_model": model(tmp_path), **external, "backend_config": {OPTIONS: {"language_model_only": True}}}
    )
    assert sight(config).model_type == "qwen3_vl"
