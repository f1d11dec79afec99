"""The features that skyrl promises for each kind of inference server."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.inference import features
from skyrl.inference.features import InferenceFeatures, inference_features

MANAGED: dict[str, Any] = {"base_model": str(model_path())}
COLOCATED = MANAGED | {"backend_config": {"trainer.placement.colocate_all": True}}
EXTERNAL = MANAGED | {"external_inference_url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (MANAGED, InferenceFeatures(prompt_logprobs=True, prompt_scores=True, any_temperature=True)),
        (COLOCATED, InferenceFeatures(prompt_logprobs=True, prompt_scores=True, any_temperature=True)),
        (EXTERNAL, InferenceFeatures(prompt_logprobs=True, prompt_scores=False, any_temperature=False)),
    ],
)
def test_the_configuration_decides_the_features(options: dict[str, Any], expected: InferenceFeatures) -> None:
    assert inference_features(load_config(options)) == expected


@pytest.mark.parametrize("change", [{"plugin_installed": lambda: False}, {"vllm_version": lambda: "0.33.0"}])
def test_a_missing_plugin_or_an_unknown_vllm_leaves_no_features(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(features, name, value)
    assert inference_features(load_config(MANAGED)) == InferenceFeatures(False, False, False)
