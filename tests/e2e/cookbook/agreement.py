"""Whether sampler and trainer agree, and whether training has had an effect. Knows no recipe."""

from __future__ import annotations

import numpy as np
import tinker
from tinker import types

from ..conftest import cross_entropy
from .workspace import KEY, Run

AGREE = 1e-4
"""Bound on the mean difference of a token's logprob between sampler and trainer: float32 on both sides gives 1e-6."""


def divergence(run: Run) -> list[float]:
    """Mean of (sampler's - trainer's) logprobs of the sampled tokens, per step, as recipes of reinforcement learning
    report it."""
    return run.column("optim/kl_sample_train_v1")


def assert_rises(shares: list[float], by: float) -> None:
    """A share of right answers, step by step, rises by so much until one of the last two steps, or to nearly all."""
    assert max(shares[-2:]) > min(shares[0] + by, 0.9), shares


def assert_agree(run: Run, url: str, tokens: list[int]) -> float:
    """The mean difference of the logprobs of `tokens`, in nats, between the sampler and the trainer that the server
    makes from the run's final checkpoint. Raises AssertionError if it is not below AGREE."""
    final = run.checkpoints[-1]
    with tinker.ServiceClient(base_url=url, api_key=KEY) as client:
        sampler = client.create_sampling_client(model_path=final["sampler_path"]).result()
        sampled = np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float64)
        trainer = client.create_training_client_from_state(final["state_path"]).result()
        (output,) = trainer.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs
    apart = float(np.abs(sampled - output["logprobs"].to_numpy()).mean())
    assert apart < AGREE
    return apart


def logprob(sampler: tinker.SamplingClient, prompt: list[int], answer: list[int]) -> float:
    """Of the answer's tokens after the prompt's, in nats."""
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(prompt + answer)).result()
    return sum(score or 0.0 for score in scores[len(prompt) :])
