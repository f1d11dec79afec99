"""A pass gives the same bits whatever other passes run with it, and however passes are grouped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_lora_support import assert_close, assert_same, grpo, make_backend, ok, rl, saved, sft, spec, train

from skyrl.trainer.protocol import AdamParams, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend

STEP = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0, weight_decay=0.01)
SPECS = {
    "one": spec(1, 1),
    "eight": spec(8, 2, train_mlp=False),
    "thirty-two": spec(32, 3, train_unembed=False),
}


def _passes(model_id: str, step: int) -> list[TrainingPass]:
    seed = 100 * step + list(SPECS).index(model_id)
    return [
        train(model_id, sft(seed, 3, 17, 1, 40)),
        train(model_id, rl(seed + 10, 12, 5), "ppo"),
        train(model_id, rl(seed + 20, 1, 2, 30), "importance_sampling"),
        train(model_id, grpo(seed + 30, 2, 3, 20), "importance_sampling"),
    ]


def _backend(*model_ids: str, merge: bool = False) -> LoraBackend:
    backend = make_backend(micro_batch_tokens=48, merge=merge)
    for model_id in model_ids:
        backend.create_model(model_id, SPECS[model_id])
    return backend


def _assert_same_results(results: list[PassResult], expected: list[PassResult]) -> None:
    for result, expected_result in zip(results, expected, strict=True):
        assert result.metrics == expected_result.metrics
        for logprobs, expected_logprobs in zip(result.logprobs, expected_result.logprobs, strict=True):
            assert np.array_equal(logprobs, expected_logprobs)


def test_a_model_trained_in_mixed_batches_gets_the_same_weights_as_alone(tmp_path: Path) -> None:
    mixed = _backend(*SPECS)
    alone = {model_id: _backend(model_id) for model_id in SPECS}
    for step in range(3):
        queues = [_passes(model_id, step) for model_id in SPECS]
        interleaved = [training_pass for row in zip(*queues, strict=True) for training_pass in row]
        together = ok(mixed.run(interleaved))
        for number, (model_id, queue) in enumerate(zip(SPECS, queues, strict=True)):
            alone_results = [ok(alone[model_id].run([training_pass]))[0] for training_pass in queue]
            _assert_same_results(together[number :: len(SPECS)], alone_results)
            assert mixed.optim_step(model_id, STEP) == alone[model_id].optim_step(model_id, STEP)
    for model_id in SPECS:
        state = saved(mixed, model_id, tmp_path / "mixed" / model_id)
        assert_same(state, saved(alone[model_id], model_id, tmp_path / "alone" / model_id))
        first_tensor = next(iter(state.values()))
        assert not torch.equal(first_tensor, torch.zeros_like(first_tensor))


def test_grouping_of_passes_does_not_change_the_gradients(tmp_path: Path) -> None:
    queue = [p for model_id in SPECS for p in _passes(model_id, 0)]
    forwards = [TrainingPass(p.model_id, p.data, p.loss_fn, backward=False) for p in queue]
    groupings = {
        "all": [queue],
        "singly": [[training_pass] for training_pass in queue],
        "pairs": [queue[index : index + 2] for index in range(0, len(queue), 2)],
        "between forwards": [[p for pair in zip(forwards, queue, strict=True) for p in pair]],
        "models reversed": [[p for model_id in reversed(SPECS) for p in _passes(model_id, 0)]],
    }
    states = {}
    for name, groups in groupings.items():
        backend = _backend(*SPECS)
        for group in groups:
            ok(backend.run(group))
        states[name] = {m: saved(backend, m, tmp_path / name / m) for m in SPECS}
    for name, state in states.items():
        for model_id in SPECS:
            assert any(key.startswith("gradient.") for key in state[model_id]), name
            assert_same(state[model_id], states["all"][model_id])


def test_initial_weights_do_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    forwards, backwards = _backend(*SPECS), _backend(*reversed(SPECS))
    torch.manual_seed(99)
    for model_id in SPECS:
        one = saved(forwards, model_id, tmp_path / "f" / model_id)
        assert_same(one, saved(backwards, model_id, tmp_path / "b" / model_id))
        drawn = next(value for key, value in one.items() if key.endswith("lora_A"))
        bound = 1 / np.sqrt(drawn.shape[1])
        assert drawn.abs().max() <= bound
        assert drawn.abs().max() > 0.8 * bound
        assert not any(value.any() for key, value in one.items() if key.endswith("lora_B"))


def test_merged_passes_of_different_ranks_equal_separate_ones_up_to_rounding(tmp_path: Path) -> None:
    """Merged slices of adapters of rank 1, 8 and 32 share a micro-batch."""
    merged, separate = _backend(*SPECS, merge=True), _backend(*SPECS)
    for step in range(3):
        queue = [p for model_id in SPECS for p in _passes(model_id, step)]
        for one, other in zip(ok(merged.run(queue)), ok(separate.run(queue)), strict=True):
            for logprobs, expected_logprobs in zip(one.logprobs, other.logprobs, strict=True):
                np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-4)
        for model_id in SPECS:
            state = saved(merged, model_id, tmp_path / "merged" / f"{model_id}{step}")
            assert_close(state, saved(separate, model_id, tmp_path / "apart" / f"{model_id}{step}"), 1e-3)
            for backend in (merged, separate):
                backend.optim_step(model_id, AdamParams(learning_rate=1e-2, eps=1e-3))


def test_a_neighbour_in_a_merged_pass_changes_at_most_rounding(tmp_path: Path) -> None:
    """The bound of docs/decisions/lora-products.md for one pass, whatever the neighbours hold."""
    alone = _backend("eight")
    expected = ok(alone.run(_passes("eight", 1)[:1]))
    state = saved(alone, "eight", tmp_path / "alone")
    for step in range(3):
        merged = _backend(*SPECS, merge=True)
        neighbours = [_passes(model_id, step)[number] for model_id in ("one", "thirty-two") for number in (1, 2)]
        results = ok(merged.run([neighbours[0], _passes("eight", 1)[0], *neighbours[1:]]))
        for one, other in zip(results[1].logprobs, expected[0].logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        assert_close(saved(merged, "eight", tmp_path / str(step)), state, 1e-5)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_splitting_a_pass_changes_only_rounding_and_is_deterministic(tmp_path: Path, loss_fn: str) -> None:
    data = (sft if loss_fn == "cross_entropy" else rl)(4, 20, 9, 31, 16, 2, 25, 60)
    states = {}
    results = {}
    for name, budget in (("whole", 4096), ("split", 32), ("again", 32)):
        backend = make_backend(micro_batch_tokens=budget)
        backend.create_model("m", spec())
        results[name] = ok(backend.run([train("m", data, loss_fn)]))
        states[name] = saved(backend, "m", tmp_path / name)
    assert_same(states["split"], states["again"])
    _assert_same_results(results["split"], results["again"])
    assert_close(states["split"], states["whole"], 5e-6)
    assert results["split"][0].metrics == pytest.approx(results["whole"][0].metrics, rel=1e-5)
    for logprobs, expected_logprobs in zip(results["split"][0].logprobs, results["whole"][0].logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-tied"])
def test_training_a_model_does_not_change_the_base_model(architecture: str) -> None:
    """In "qwen3-tied" the embeddings are tied to the lm_head, which the adapter trains."""
    backend = make_backend(architecture)
    data = sft(1, 20, 9)
    results = []
    for model_id in ("trained", "fresh"):
        backend.create_model(model_id, spec(seed=5))
        results += ok(backend.run([TrainingPass(model_id, data, "cross_entropy", backward=False)]))
        ok(backend.run([train(model_id, data)]))
        backend.optim_step(model_id, STEP)
    _assert_same_results(results[:1], results[1:])
