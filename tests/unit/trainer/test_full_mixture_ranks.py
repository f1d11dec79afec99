"""Full fine-tuning of mixtures of experts on several ranks, against one device: numbers, and files byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_support import STEP, closed_at_end
from safetensors.torch import load_file
from torch_lora_support import assert_close, files_saved, make_full, ok, rl, sft, train
from transformers import AutoModelForCausalLM

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.experts.routing import CORRECTION
from skyrl.trainer.ranks import full_backend
from tests.families import MIXTURES, make_family

WHOLE = LoraSpec(rank=0, alpha=32.0, seed=0)
TOLERANCE = 1e-4
"""Ten times that of dense models: a router sums the roundings of all experts, and steps of 1e-2 spread them."""

IN_CI = ("qwen3.5-moe", "gpt-oss", "deepseek-v3", "nemotron-h")
"""Experts beside a shared one, experts with biases in one tensor, corrected routers, and experts without gates."""


def _learn(backend: Any) -> Any:
    """Two steps, and a pass whose gradient waits. Returns results, and metrics of steps."""
    results, metrics = [], []
    for step in range(2):
        passes = [train("m", sft(step, 3, 17, 1, 40)), train("m", rl(step + 10, 12, 5, 30), "ppo")]
        results += ok(backend.run(passes))
        metrics.append(backend.optim_step("m", STEP))
    return results + ok(backend.run([train("m", sft(9, 8, 20))])), metrics


def _files(backend: Any, directory: Path) -> dict[str, bytes]:
    """All files of a model's state and of its export in bfloat16, by name."""
    for name in ("state", "rounded"):
        (directory / name).mkdir(parents=True)
    backend.save_state("m", directory / "state")
    backend.save_adapter("m", directory / "rounded", dtype="bfloat16")
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.*")}


@pytest.mark.parametrize(
    "family", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES]
)
def test_two_ranks_train_a_mixture_as_one_device_does_and_write_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(full_backend, "PAGE", 5000)  # so that pages cut the tensors of experts
    path = make_family(family, tmp_path)
    with closed_at_end(make_full) as make:
        one, two = make(path=path), make(path=path, ranks=2)
        runs, states = [], []
        for backend in (one, two):
            backend.create_model("m", WHOLE)
            runs.append(_learn(backend))
            states.append(files_saved(backend, "m", tmp_path / f"state{len(states)}"))
        for found, expected in zip(runs[1][0], runs[0][0], strict=True):
            for logprobs, others in zip(found.logprobs, expected.logprobs, strict=True):
                np.testing.assert_allclose(logprobs, others, rtol=TOLERANCE, atol=TOLERANCE)
        for found, expected in zip(runs[1][1], runs[0][1], strict=True):
            assert found == pytest.approx(expected, rel=TOLERANCE)
        assert_close(states[0], states[1], TOLERANCE)
        files = _files(two, tmp_path / "two")
        one.load_state("m", tmp_path / "two" / "state", optimizer=True)
        assert _files(one, tmp_path / "one") == files
        two.load_state("m", tmp_path / "one" / "state", optimizer=True)
        assert _files(two, tmp_path / "again") == files


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss"])
def test_an_export_has_the_tensors_of_the_release_with_corrections_in_float32(tmp_path: Path, family: str) -> None:
    path = make_family(family, tmp_path)
    with closed_at_end(make_full) as make:
        backend = make(path=path, ranks=2)
        backend.create_model("m", WHOLE)
        (tmp_path / "saved").mkdir()
        backend.save_adapter("m", tmp_path / "saved", dtype="bfloat16")
    released, saved = load_file(Path(path) / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == released.keys()
    for name, tensor in released.items():
        assert torch.equal(saved[name], tensor if name.endswith(CORRECTION) else tensor.bfloat16()), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
