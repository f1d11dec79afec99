"""Which rewards of a pass count for its run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from skyrl.engine.execution import rewards_of
from skyrl.trainer.protocol import Datum, TrainingPass
from tests.unit.custom_losses import handle_of, loss_of

TOKENS = np.arange(3)
DATA = [Datum(TOKENS, {"rewards": np.array([0.0, 0.5, 1.0], np.float32)}), Datum(TOKENS, {})]


def test_a_critics_rewards_are_summed_over_the_positions_of_each_sequence() -> None:
    assert rewards_of(TrainingPass("model", DATA, "ppo")) == [1.5]


def test_an_input_of_a_custom_loss_is_no_reward_whatever_its_name() -> None:
    loss = loss_of(handle_of(lambda logprobs, rewards: ((logprobs * rewards).sum(), {}), rewards=1))
    assert rewards_of(replace(TrainingPass("model", DATA, "custom"), custom_loss=loss)) == []
