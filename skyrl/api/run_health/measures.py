"""The numbers by which a run's health is judged: which side of each is bad, and the sentence for it.

A sentence has the numbers, the step since when, the likely cause and what to do. It begins with a small letter, ends
without a full stop, and is the same on the page, on a terminal and in JSON. docs/operating/status.md lists all of them.
Knows steps; knows nothing of what is usual for a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skyrl.api.run_health.usual import Bounds, Level
from skyrl.storage.db.run_steps import Step

Format = Callable[[float], str]
NOT_TOLD = "temperature, top_p and top_k that loss_fn_config does not tell the trainer"


def plain(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def nats(value: float) -> str:
    return f"{value:.2g} nats" if abs(value) < 0.1 else f"{value:.2f} nats"


def seconds(value: float) -> str:
    """Finer than the durations of other sentences: steps may take milliseconds."""
    if value < 1:
        return f"{1e3 * value:.0f} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


@dataclass(frozen=True)
class Measure:
    """One number of a run. `value` is None for a step that has no such number. `causes`: by "high" and "low", what is
    likely, and what to do. `missing` says why no step has a value. `limit`: a level beyond it is said whatever the
    run's past was, with `at_limit`, in which `{now}` stands for the level."""

    name: str
    value: Callable[[Step], float | None]
    bounds: Bounds
    causes: dict[str, str]
    missing: str
    text: Format = plain
    subject: str = ""
    limit: float | None = None
    at_limit: str = ""
    verbs: dict[str, str] = field(default_factory=lambda: {"high": "rose", "low": "fell"})

    def sentence(self, level: Level) -> str | None:
        """What is wrong with the number, if anything is."""
        if level.since is not None and level.usual is not None:
            side = "high" if level.now > level.usual else "low"
            numbers = f"from {self.text(level.usual)} to {self.text(level.now)} since step {level.since}"
            return f"{self.subject or self.name} {self.verbs[side]} {numbers}: {self.causes[side]}"
        if self.limit is not None and level.now >= self.limit:
            return self.at_limit.format(now=self.text(level.now))
        return None


def _away(step: Step) -> float | None:
    return None if step.ratio is None else abs(step.ratio - 1)


def _gap(step: Step) -> float | None:
    return None if step.gap is None else abs(step.gap)


MEASURES = (
    Measure(
        "reward",
        lambda step: step.reward,
        Bounds("low", 0.01, 0.2),
        {"low": "if gap or entropy changed before it, lower the learning rate or load an earlier checkpoint"},
        "the server gets rewards only of agents' sessions, and as the input rewards of a critic",
    ),
    Measure(
        "loss",
        lambda step: step.loss,
        Bounds("high", 0.02, 0.1),
        {"high": "other data, or a learning rate that is too large"},
        "only passes with cross_entropy, and no negative weight, have one",
        nats,
    ),
    Measure(
        "gap",
        _gap,
        Bounds("high", 0.02, 1.0),
        {"high": f"samples of older weights, or sampled with {NOT_TOLD}, or a learning rate that is too large"},
        "no pass had an advantage and the sampler's logprobs",
        nats,
        "the gap between sampler and trainer",
        0.05,
        "the gap between sampler and trainer is {now} (0.01 to 0.02 is healthy on GPUs): samples of older weights, or "
        f"sampled with {NOT_TOLD}",
    ),
    Measure(
        "ratio's distance from 1",
        _away,
        Bounds("high", 0.1, 1.0),
        {"high": f"samples of older weights, or sampled with {NOT_TOLD}, or too many passes over the same samples"},
        "no pass had an advantage and the sampler's logprobs",
        plain,
        "the ratio's distance from 1",
    ),
    Measure(
        "clip fraction",
        lambda step: step.clip_fraction,
        Bounds("high", 0.1, 0.5),
        {"high": "the learning rate is too large, or there are too many passes over the same samples"},
        "no pass had a loss that clips or masks tokens",
        percent,
        "the part of clipped tokens",
    ),
    Measure(
        "entropy of samples",
        lambda step: step.entropy,
        Bounds("both", 0.05, 0.5),
        {
            "low": "the policy collapses, or samples have another temperature; lower the learning rate",
            "high": "samples get random, or have another temperature; lower the learning rate",
        },
        "no sample of this run's weights with logprobs has ended, greedy ones and chats left out",
        nats,
    ),
    Measure(
        "truncated samples",
        lambda step: step.truncated,
        Bounds("high", 0.15),
        {"high": "max_tokens may be too small, or answers grow without an end"},
        "no sample of this run's weights has ended",
        percent,
        "",
        0.5,
        "{now} of the samples end at max_tokens: it may be too small",
    ),
    Measure(
        "advantages",
        lambda step: step.active,
        Bounds("low", 0.05, 0.5),
        {"low": "more and more groups have equal rewards: choose other prompts, or sample more for each"},
        "no pass had advantages",
        percent,
        "the part of tokens with an advantage",
    ),
    Measure(
        "step time",
        lambda step: step.wall_s,
        Bounds("high", 0.5, 0.5),
        {"high": ""},
        "fewer than two steps have ended",
        seconds,
        "step time",
    ),
)
"""In the order in which they are shown."""
