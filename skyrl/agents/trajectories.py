"""Trajectories, and what each is worth: rewards become advantages, and advantages training data.

1. `run` gives groups: several trajectories of each task, each with a reward, or None if its agent has failed.
2. `advantages`: the reward minus the mean of its group's rewards. A failed trajectory has none, and is no part of the
   mean: that an agent broke says nothing about how well the others did.
3. `collect`: Tinker's `Datum`s. Each sampled token gets the advantage of its trajectory, each other token 0.

A trajectory's tokens are rows as the trainer takes them. A row is one path through the session's tree of turns. Tokens
that several paths share are trained in one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl.agents.errors import BadAnswer

if TYPE_CHECKING:
    from tinker import types


@dataclass(frozen=True, eq=False)
class Row:
    """`tokens` (int64), `mask` (bool: trained here) and `logprobs` (float32, those under which the tokens were sampled;
    0 where the mask is False) have the same shape [n], n at least 2. The first token is never trained.

    `constrained` (bool [n]) are the tokens of which a grammar, such as that of a tool that must be called, has narrowed
    the choice; None: none. Their logprobs are the model's own. Where the server does not know those, the whole turn is
    constrained, and its mask is False.

    `routed_experts` (int64 [n - 1, columns], packed) are the experts of a mixture that the sampler used, if the session
    kept them; see docs/howto/mixtures-of-experts.md. `template_note` says how the model's template writes a part of the
    row otherwise, in a session with `thinking="keep"`; None if the row is as the template writes it."""

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    routed_experts: NDArray[np.int64] | None = None
    constrained: NDArray[np.bool_] | None = None
    template_note: str | None = None

    def datum(self, advantage: float, *, train_constrained: bool = True) -> types.Datum:
        """For the losses `importance_sampling`, `ppo` and `cispo`: position i of the inputs is about token i + 1.
        Without `train_constrained`, constrained tokens have no part in the loss."""
        from tinker import types  # only here: a caller that trains elsewhere does not need it

        trained = self.mask if train_constrained or self.constrained is None else self.mask & ~self.constrained
        inputs = {
            "target_tokens": types.TensorData.from_numpy(self.tokens[1:]),
            "logprobs": types.TensorData.from_numpy(self.logprobs[1:]),
            "advantages": types.TensorData.from_numpy(trained[1:].astype(np.float32) * np.float32(advantage)),
        }
        if self.routed_experts is not None:
            inputs["routed_experts"] = types.TensorData.from_numpy(self.routed_experts)
        return types.Datum(model_input=types.ModelInput.from_ints(self.tokens[:-1].tolist()), loss_fn_inputs=inputs)


class _Floats(msgspec.Struct):
    data: list[float]


class _Integers(msgspec.Struct):
    data: list[int]


class _Chunk(msgspec.Struct):
    tokens: list[int]


class _Input(msgspec.Struct):
    chunks: tuple[_Chunk]


class _LossInputs(msgspec.Struct):
    target_tokens: _Integers
    logprobs: _Floats
    mask: _Floats
    routed_experts: _Integers | None = None
    constrained: _Floats | None = None


class _Datum(msgspec.Struct):
    """A row as a datum: its loss inputs are about the tokens after the first one."""

    model_input: _Input
    loss_fn_inputs: _LossInputs
    template_note: str | None = None


def rows_of(data: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows from the server's JSON of the format `datums`. Raises BadAnswer."""
    return [_row(datum) for datum in data]


def _row(datum: dict[str, Any]) -> Row:
    try:
        read = msgspec.convert(datum, _Datum)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"a row of a trajectory: {error}") from None
    before, inputs = read.model_input.chunks[0].tokens, read.loss_fn_inputs
    narrowed = inputs.constrained
    lists = (inputs.target_tokens, inputs.logprobs, inputs.mask, narrowed or inputs.mask)
    lengths = {len(before), *(len(each.data) for each in lists)}
    if len(lengths) > 1 or not before:
        raise BadAnswer("a row of a trajectory has lists of different lengths")
    tokens = np.array([*before, *inputs.target_tokens.data[-1:]], np.int64)
    mask = np.array([0, *inputs.mask.data], np.bool_)
    logprobs = np.array([0, *inputs.logprobs.data], np.float32)
    experts = inputs.routed_experts
    try:
        packed = None if experts is None else np.array(experts.data, np.int64).reshape(len(before), -1)
    except ValueError:
        raise BadAnswer("a row of a trajectory has routed experts for another number of tokens") from None
    constrained = None if narrowed is None else np.array([0, *narrowed.data], np.bool_)
    return Row(tokens, mask, np.where(mask, logprobs, np.float32(0)), packed, constrained, read.template_note)


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
