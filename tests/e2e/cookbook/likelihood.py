"""How likely a sampler finds an answer. Knows no recipe."""

from __future__ import annotations

import tinker
from tinker import types


def logprob(sampler: tinker.SamplingClient, prompt: list[int], answer: list[int]) -> float:
    """Of the answer's tokens after the prompt's, in nats."""
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(prompt + answer)).result()
    return sum(score or 0.0 for score in scores[len(prompt) :])
