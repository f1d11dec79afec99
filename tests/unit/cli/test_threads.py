"""How many threads the trainer and vLLM get where the configuration does not say."""

from __future__ import annotations

import os
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.cli.launcher import main
from skyrl.cli.launcher.main import MOST_THREADS, with_threads

TWO = [{"base_model": "tiny"}, {"base_model": "tiny", "served_model_names": ["teacher"], "uses": ["sample"]}]


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [
        (6, {}, 6),
        (6, {"threads": 1}, 1),
        (200, {}, MOST_THREADS),
        (6, {"backend_config": {"generator.inference_engine.num_engines": 2}}, 3),
        (1, {"backend_config": {"generator.inference_engine.num_engines": 2}}, 1),
        (6, {"backend_config": {"trainer.placement.policy_num_gpus_per_node": 2}}, 1),  # ranks: on a Ray cluster
        (6, {"ray_address": "local"}, 1),
    ],
)
def test_vllm_and_the_trainer_get_all_cores_unless_they_are_told_or_share_them(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, Any], expected: int
) -> None:
    monkeypatch.delenv("SKYRL_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(main, "cuda_devices", list)
    assert with_threads(load_config({"base_model": "tiny"} | given)).threads == expected


def test_several_base_models_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYRL_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr(main, "cuda_devices", list)
    assert with_threads(load_config({"base_models": TWO})).threads == 3


def test_on_a_gpu_the_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYRL_THREADS", raising=False)
    monkeypatch.setattr(main, "cuda_devices", lambda: ["0"])
    assert with_threads(load_config({"base_model": "tiny"})).threads == 1
