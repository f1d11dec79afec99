"""Trajectories in groups, and what each is worth: rewards become advantages, and advantages training data.

1. `run` gives groups: several trajectories of each task, each with a reward, or None if its agent has failed.
2. `advantages`: the reward minus the mean of its group's rewards. A failed trajectory has none, and is no part of the
   mean: that an agent broke says nothing about how well the others did.
3. `collect`: Tinker's `Datum`s. Each sampled token gets the advantage of its trajectory, each other token 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from skyrl.agents.rows import Row

if TYPE_CHECKING:
    from tinker import types

T = TypeVar("T")
SMALLEST_SPREAD = 1e-6
"""Rewards of a group with a smaller standard deviation count as equal."""


@dataclass(frozen=True)
class Trajectory:
    """The session of one agent. `reward` is None, and there are no `rows`, if the agent has failed (`error` says how)
    or gave no reward."""

    session_id: str
    reward: float | None
    rows: tuple[Row, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Group(Generic[T]):
    """The trajectories of one task."""

    task: T
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        """Of those that have one."""
        return [each.reward for each in self.trajectories if each.reward is not None]


def advantages(groups: Iterable[Group[T]], *, divide_by_std: bool = False) -> list[list[float | None]]:
    """For each group one advantage per trajectory; None without a reward. With `divide_by_std` in units of the group's
    standard deviation."""
    return [_in_group(group, divide_by_std) for group in groups]


def _in_group(group: Group[T], divide_by_std: bool) -> list[float | None]:
    rewards = np.asarray(group.rewards, np.float64)
    if not rewards.size or rewards.std() < SMALLEST_SPREAD:
        return [None if each.reward is None else 0.0 for each in group.trajectories]
    mean, scale = rewards.mean(), rewards.std() if divide_by_std else 1.0
    return [None if each.reward is None else float((each.reward - mean) / scale) for each in group.trajectories]


def collect(
    groups: Sequence[Group[T]], *, divide_by_std: bool = False, train_constrained: bool = True
) -> list[types.Datum]:
    """Data for `forward_backward(data, "importance_sampling")` or `"ppo"`. Trajectories whose advantage is 0 are left
    out, because they have no gradient. `train_constrained`: see `Row.datum`. Needs the package `tinker`."""
    data = []
    for group, values in zip(groups, advantages(groups, divide_by_std=divide_by_std), strict=True):
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            if advantage:
                data += [row.datum(advantage, train_constrained=train_constrained) for row in trajectory.rows]
    return data
