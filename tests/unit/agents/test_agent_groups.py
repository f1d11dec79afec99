"""Rewards of groups become advantages, and advantages Tinker's data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skyrl.agents import BadAnswer, Group, Trajectory, advantages, collect
from skyrl.agents.trajectories import rows_of

TOKENS = [5, 6, 7, 8, 9]
INPUTS: dict[str, list[int] | list[float]] = {
    "target_tokens": TOKENS[1:],
    "logprobs": [0.0, -0.5, 0.0, -0.25],
    "advantages": [0.0, 0.0, 0.0, 0.0],
    "mask": [0.0, 1.0, 0.0, 1.0],
}
EXPERTS = [1, 2, -3, 4, 5, 6, 7, -(2**63)]


def row(**changed: list[int] | list[float]) -> dict[str, Any]:
    """A row as the server sends it."""
    inputs = {name: {"data": data, "shape": [len(data)]} for name, data in (INPUTS | changed).items()}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]}, "loss_fn_inputs": inputs}


def group(*rewards: float | None) -> Group[str]:
    rows = tuple(rows_of([row()]))
    return Group("task", tuple(Trajectory("s", reward, () if reward is None else rows) for reward in rewards))


def test_an_advantage_is_the_reward_minus_the_mean_of_its_group() -> None:
    assert advantages([group(1.0, 0.0, 0.0, 1.0), group(3.0, 1.0)]) == [[0.5, -0.5, -0.5, 0.5], [1.0, -1.0]]


def test_advantages_in_standard_deviations() -> None:
    assert advantages([group(3.0, 1.0, 1.0, 3.0)], divide_by_std=True) == [[1.0, -1.0, -1.0, 1.0]]
    assert advantages([group(0.1, 0.1, 0.1)], divide_by_std=True) == [[0.0, 0.0, 0.0]], "equal but for rounding"


def test_a_failed_trajectory_has_no_advantage_and_is_no_part_of_the_mean() -> None:
    assert advantages([group(1.0, None, 0.0)]) == [[0.5, None, -0.5]]
    assert advantages([group(None, None), group(2.0, None)]) == [[None, None], [0.0, None]]


def test_a_datum_has_the_advantage_at_the_positions_whose_targets_were_sampled() -> None:
    better, worse = collect([group(1.0, 0.0, None), group(1.0, 1.0)])
    assert better.model_input.to_ints() == [5, 6, 7, 8]
    inputs = {name: tensor.to_numpy() for name, tensor in better.loss_fn_inputs.items()}
    assert inputs["target_tokens"].tolist() == [6, 7, 8, 9]
    np.testing.assert_array_equal(inputs["advantages"], np.array([0, 0.5, 0, 0.5], np.float32))
    np.testing.assert_array_equal(inputs["logprobs"], np.array([0, -0.5, 0, -0.25], np.float32))
    assert worse.loss_fn_inputs["advantages"].to_numpy().tolist() == [0, -0.5, 0, -0.5]


def test_a_datum_has_the_experts_that_the_session_kept() -> None:
    (kept,) = rows_of([row(routed_experts=EXPERTS)])
    inputs = kept.datum(1.0).loss_fn_inputs
    np.testing.assert_array_equal(inputs["routed_experts"].to_numpy(), np.reshape(EXPERTS, (4, 2)))
    (without,) = rows_of([row()])
    assert "routed_experts" not in without.datum(1.0).loss_fn_inputs


def test_constrained_tokens_can_be_left_out_of_the_loss() -> None:
    (marked,) = rows_of([row(constrained=[0.0, 1.0, 0.0, 0.0])])
    assert marked.constrained is not None
    assert marked.constrained.tolist() == [False, False, True, False, False]
    trajectories = (Trajectory("s", 1.0, (marked,)), Trajectory("s", -1.0, (marked,)))
    for kept, weights in ((True, [0, 1, 0, 1]), (False, [0, 0, 0, 1])):
        better, _ = collect([Group("task", trajectories)], train_constrained=kept)
        assert better.loss_fn_inputs["advantages"].to_numpy().tolist() == weights
        assert "constrained" not in better.loss_fn_inputs, "no loss knows it"


@pytest.mark.parametrize(
    "damage",
    [{"constrained": [1.0]}, {"mask": [1.0]}, {"target_tokens": [6.5, 7, 8, 9]}, {"routed_experts": [1, 2, 3]}],
)
def test_a_row_that_contradicts_itself_is_refused(damage: dict[str, list[int] | list[float]]) -> None:
    with pytest.raises(BadAnswer):
        rows_of([row(**damage)])
