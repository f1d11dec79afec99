"""What the tests of ranks share, for adapters and for full fine-tuning: passes, runs of adapters, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_lora_support import assert_close, assert_same, grpo, ok, rl, saved, sft, train

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import AdamParams, PassResult, TrainingPass

TOLERANCE = 1e-5
STEP = AdamParams(learning_rate=1e-2, eps=0.1, grad_clip_norm=100.0, weight_decay=0.01)
"""With an `eps` above the rounding of gradients. With a smaller one, a weight whose gradient is 0 but for rounding
would make a whole step in the direction of the rounding."""
Run = tuple[list[PassResult], list[dict[str, float]], dict[str, Any]]
"""The results of passes, the metrics of steps, and saved tensors."""


@contextmanager
def closed_at_end(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`make`, whose backends are closed when the block ends."""
    made: list[Any] = []

    def kept(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    yield kept
    for backend in made:
        backend.close()


def uneven_passes(model_id: str, seed: int) -> list[TrainingPass]:
    """Passes of uneven sequences, one with shared prompts; the last has one sequence, fewer than there are ranks."""
    return [
        train(model_id, sft(seed, 3, 17, 1, 40)),
        train(model_id, rl(seed + 10, 12, 5, 30, 30, 2), "ppo"),
        train(model_id, grpo(seed + 15, 3, 4, 20), "importance_sampling"),
        TrainingPass(model_id, sft(seed + 20, 8, 20), "cross_entropy", backward=False),
        train(model_id, sft(seed + 30, 11)),
    ]


def learn_together(
    backend: Any,
    directory: Path,
    specs: Mapping[str, LoraSpec],
    passes: Callable[[str, int], list[TrainingPass]],
    steps: int,
) -> Run:
    """Train adapters in mixed batches, and then run passes whose gradient waits; returns results, metrics of steps, and
    of each adapter all weights, moments and gradients. `passes`: of an adapter in a step."""
    results: list[PassResult] = []
    metrics: list[dict[str, float]] = []
    for model_id, spec in specs.items():
        backend.create_model(model_id, spec)
    for step in range(steps):
        queues = [passes(model_id, step) for model_id in specs]
        results += ok(backend.run([each for row in zip(*queues, strict=True) for each in row]))
        metrics += [backend.optim_step(model_id, STEP) for model_id in specs]
    for model_id in specs:
        results += ok(backend.run(passes(model_id, steps)))
    return results, metrics, {model_id: saved(backend, model_id, directory / model_id) for model_id in specs}


def assert_close_runs(one: Run, other: Run, *, of_weights: float = TOLERANCE) -> None:
    """Two runs of `learn_together` are equal up to rounding. `of_weights`: the tolerance of adapters' weights."""
    assert_close_results(one, other)
    for model_id, state in one[2].items():
        assert {key.partition(".")[0] for key in state} == {"weights", "exp_avg", "exp_avg_sq", "gradient"}
        weights = {key: value for key, value in state.items() if key.startswith("weights.")}
        expected = other[2][model_id]
        assert_close(weights, {key: expected[key] for key in weights}, of_weights)
        others = {key: value for key, value in state.items() if key not in weights}
        assert_close(others, {key: value for key, value in expected.items() if key not in weights}, TOLERANCE)


def assert_same_runs(one: Run, other: Run) -> None:
    """Two runs of `learn_together` have the same bits."""
    assert_same_results(one, other)
    for model_id, state in one[2].items():
        assert_same(state, other[2][model_id])


def assert_close_results(one: Run, other: Run) -> None:
    """Results of passes and metrics of steps are equal up to rounding."""
    for result, expected in zip(one[0], other[0], strict=True):
        for logprobs, expected_logprobs in zip(result.logprobs, expected.logprobs, strict=True):
            assert logprobs.shape == expected_logprobs.shape
            assert logprobs.dtype == np.float32
            np.testing.assert_allclose(logprobs, expected_logprobs, rtol=TOLERANCE, atol=TOLERANCE)
        other_rows = {"computed_tokens:sum": result.metrics["computed_tokens:sum"]}  # prompts are on several ranks
        assert result.metrics == pytest.approx(expected.metrics | other_rows, rel=TOLERANCE, abs=5e-5)
    for metrics, expected in zip(one[1], other[1], strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE)


def assert_same_results(one: Run, other: Run) -> None:
    """Results of passes and metrics of steps have the same bits."""
    for result, expected in zip(one[0], other[0], strict=True):
        assert result.metrics == expected.metrics
        for logprobs, expected_logprobs in zip(result.logprobs, expected.logprobs, strict=True):
            assert np.array_equal(logprobs, expected_logprobs)
    assert one[1] == other[1]
