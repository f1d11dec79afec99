"""Adapters that are updated together, as on CUDA, have the numbers of passes alone, up to rounding: logprobs within
2e-5, gradients within 1e-5 of the largest one. Numbers that are not finite stay with their tenant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_lora_support import VOCAB, grpo, make_backend, ok, rl, saved, sft, spec, train

from skyrl.trainer.lora import linear
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.protocol import AdamParams, PassResult, TrainingPass
from skyrl.trainer.ranks import lora_rank
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

RANKS = {"a": 8, "e": 64, "b": 16, "c": 8, "d": 4}
LAYERS: dict[str, dict[str, bool]] = {"b": {"train_mlp": False}, "c": {"train_attn": False}}
"""Grouped products take all together but e, which stands between the others: the rest would become more than four times
as large. The scales are 4, 2, 4 and 8."""
HIGH_RANKS: dict[str, Any] = {"policy.model.lora.max_lora_rank": 64}


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA's branch. The list gets the number of adapters of each product that was grouped."""
    found: list[int] = []
    grouped_mm = linear.grouped_mm

    def noted(x: torch.Tensor, y: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        found.append(len(offs))
        return grouped_mm(x, y, offs=offs)

    monkeypatch.setattr(lora_rank, "groups_adapters", lambda device: True)
    monkeypatch.setattr(linear, "grouped_mm", noted)
    return found


def _backend(*, merge: bool) -> LoraBackend:
    """With adapters that have made a step, so that lora_B is not 0."""
    backend = make_backend(merge=merge, **HIGH_RANKS)
    for model_id, rank in RANKS.items():
        backend.create_model(model_id, spec(rank, seed=ord(model_id), **LAYERS.get(model_id, {})))
        ok(backend.run([train(model_id, sft(0, 20))]))
        backend.optim_step(model_id, AdamParams(learning_rate=1e-2))
    return backend


def _passes() -> list[TrainingPass]:
    data = [rl(1, 20, 20), grpo(2, 2, 4, 24), grpo(3, 1, 5, 24, 20), sft(4, 17, 9), rl(5, 20)]
    losses = ("ppo", "importance_sampling", "ppo", "cross_entropy", "dro")
    return [train(*each) for each in zip(RANKS, data, losses, strict=True)]


def _assert_close(
    results: Sequence[PassResult], merged: LoraBackend, chosen: Sequence[TrainingPass], path: Path
) -> None:
    """To each pass alone."""
    alone = _backend(merge=False)
    for each, result in zip(chosen, results, strict=True):
        (expected,) = ok(alone.run([each]))
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        found, right = (
            {name: tensor for name, tensor in saved(backend, each.model_id, path / name).items() if "gradient" in name}
            for name, backend in (("merged", merged), ("alone", alone))
        )
        largest = max(float(tensor.abs().max()) for tensor in right.values())
        assert largest > 0
        for name, tensor in right.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("rows_of_a_chunk", [4096, 7])
def test_passes_have_the_numbers_of_passes_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grouped: list[int], rows_of_a_chunk: int
) -> None:
    """Also where the output layer computes few rows at once, none of them of some tenants."""
    merged = _backend(merge=True)
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows_of_a_chunk * VOCAB * 4)
    assert not grouped
    chosen = _passes()
    results = ok(merged.run(chosen))
    assert set(grouped) == {4}
    _assert_close(results, merged, chosen, tmp_path)


def test_weights_that_are_not_finite_change_nothing_of_other_tenants(tmp_path: Path, grouped: list[int]) -> None:
    merged = _backend(merge=True)
    rank_of(merged).adapters["c"].weights.fill_(torch.nan)
    results = merged.run(_passes())
    assert set(grouped) == {4}
    assert [isinstance(each, Exception) for each in results] == [False, False, False, True, False]
    sound = [number for number in range(5) if number != 3]
    left = [_passes()[number] for number in sound]
    _assert_close(ok([results[number] for number in sound]), merged, left, tmp_path)


def test_two_passes_of_one_adapter_each_have_their_gradient(tmp_path: Path) -> None:
    """Their sequences have nothing in common, so they run as two slices."""
    merged, alone = _backend(merge=True), _backend(merge=False)
    chosen = [train("a", rl(1, 20), "ppo"), train("c", rl(2, 20), "ppo"), train("a", sft(3, 30))]
    ok(merged.run(chosen))
    ok(alone.run(chosen))
    found, right = (saved(each, "a", tmp_path / name) for name, each in (("merged", merged), ("alone", alone)))
    for name in (name for name in right if "gradient" in name):
        torch.testing.assert_close(found[name], right[name], rtol=1e-4, atol=1e-5)
