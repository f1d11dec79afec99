"""What the tests of ranks share, for adapters and for full fine-tuning: passes, and comparisons of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch_lora_support import grpo, rl, sft, train

from skyrl.training.backends.base import AdamParams, PassResult, TrainingPass

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
