"""With which options vLLM is started for models that see, and when it takes no pictures. No process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig, vision_of
from skyrl.base.pictures.picture import MAX_PICTURES
from skyrl.base.pictures.vision import SEES, NoVision, VisionConfig
from skyrl.inference.vllm_command import vllm_spec
from skyrl.sampling.job import MAX_TOPK
from tests.families import PROCESSOR

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
