"""The context that a vLLM on a CPU serves where no key says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.several import base_models_of
from skyrl.inference import vllm_command
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.model_options import longest_context
from skyrl.inference.vllm_command import context_length, context_sentence

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
