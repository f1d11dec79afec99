"""Losses: each value is compared with its formula in NumPy, on the logprobs of the same pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tinker import types

from ..catalogue import feature
from ..user import User, close, datum, logprobs_of, wait

GROUP = "Losses"


def run(user: User, loss: str, config: Mapping[str, float] | None = None, **more: Any) -> tuple[Any, ...]:
    """Run one pass of a policy loss with made-up old logprobs; returns loss, logprobs, old logprobs, advantages."""
    trainer = user.train(seed=1)
    random = np.random.default_rng(0)
    old = np.asarray(user.scores(trainer) + random.normal(0, 0.3, len(user.tokens) - 1), np.float32)
    advantages = np.asarray(random.normal(0, 1, len(old)), np.float32)
    given = datum(user.tokens, logprobs=old, advantages=advantages, **more)
    output = wait(trainer.forward_backward([given], loss, config))
    step = wait(trainer.optim_step(types.AdamParams(learning_rate=1e-3)))
    assert step.metrics["grad_norm"] > 0
    return output.metrics["loss:sum"], logprobs_of(output), old.astype(np.float64), advantages.astype(np.float64)


def clipped(ratio: np.ndarray, low: float, high: float, advantages: np.ndarray) -> float:
    return -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages).sum()


@feature(GROUP, "The weighted sum of negative logprobs.")
def cross_entropy(user: User) -> None:
    weights = np.linspace(-1, 2, len(user.tokens) - 1)
    output = wait(user.train(seed=1).forward_backward([datum(user.tokens, weights=weights)], "cross_entropy"))
    assert close(output.metrics["loss:sum"], -(weights * logprobs_of(output)).sum())
    unweighted = wait(user.train(seed=1).forward_backward([datum(user.tokens)], "cross_entropy"))
    assert close(unweighted.metrics["loss:sum"], -logprobs_of(unweighted).sum())


@feature(GROUP, "The sum of ratio times advantage.")
def importance_sampling(user: User) -> None:
    loss, lp, old, advantages = run(user, "importance_sampling")
    assert close(loss, -(np.exp(lp - old) * advantages).sum())


@feature(GROUP, "Clipped ratios, with the default and with given bounds.")
def ppo(user: User) -> None:
    loss, lp, old, advantages = run(user, "ppo")
    assert close(loss, clipped(np.exp(lp - old), 0.8, 1.2, advantages))
    narrow, *_ = run(user, "ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05})
    assert close(narrow, clipped(np.exp(lp - old), 0.95, 1.05, advantages))
    assert not close(narrow, loss)


@feature(GROUP, "Clipped importance weights on the logprobs.")
def cispo(user: User) -> None:
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    loss, lp, old, advantages = run(user, "cispo", bounds)
    assert close(loss, -(np.clip(np.exp(lp - old), 0.9, 1.1) * lp * advantages).sum())


@feature(GROUP, "Direct reward optimization with its quadratic term.")
def dro(user: User) -> None:
    loss, lp, old, advantages = run(user, "dro", {"beta": 0.1})
    assert close(loss, -(lp * advantages - 0.05 * (lp - old) ** 2).sum())


@feature(GROUP, "One clipped ratio per sequence.", needs=("loss gspo",))
def gspo(user: User) -> None:
    mask = np.ones(len(user.tokens) - 1)
    mask[:2] = 0
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    loss, lp, old, advantages = run(user, "gspo", bounds, sequence_ratio_mask=mask)
    ratio = np.full(len(lp), np.exp((lp - old)[mask != 0].mean()))
    assert close(loss, clipped(ratio, 0.9, 1.1, advantages))


@feature(
    GROUP,
    "Not served, because its formula is not published; an operator can have it served as `cispo`.",
    needs=("loss stable_reinforce",),
    refusal="stable_reinforce",
)
def stable_reinforce(user: User) -> None:
    run(user, "stable_reinforce")
