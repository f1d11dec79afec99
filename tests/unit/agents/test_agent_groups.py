"""Rewards of groups become advantages, and advantages Tinker's data."""

from __future__ import annotations

import numpy as np
import pytest

from skyrl.agents import BadAnswer, Group, Trajectory, advantages, collect
from skyrl.agents.rows import rows_of

SAMPLE = {
    "tokens": [5, 6, 7, 8, 9],
    "response_length": 3,
    "loss_mask": [1, 0, 1],
    "rollout_log_probs": [-0.5, 0.0, -0.25],
}


def group(*rewards: float | None) -> Group[str]:
    rows = tuple(rows_of([SAMPLE]))
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


@pytest.mark.parametrize("damage", [{"loss_mask": [1, 0]}, {"response_length": 5}, {"tokens": "5 6"}])
def test_a_row_that_contradicts_itself_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(BadAnswer):
        rows_of([SAMPLE | damage])
