"""Training on the real server: learning works, and a mistake affects no other request."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import TASKS
from skyrl.cli.demo.rl import Settings, Step
from skyrl.cli.demo.rl import train as train_rl

from .conftest import ClientFactory, cross_entropy

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."


def test_reinforcement_learning_raises_the_reward(connect: ClientFactory) -> None:
    steps: list[Step] = []
    settings = Settings(steps=18, prompts=8, group=8, epochs=1, learning_rate=3e-3)
    train_rl(connect(), "tiny", TASKS["count"], settings, steps.append)
    rewards = [step.reward for step in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


def test_bad_training_requests_fail_alone(connect: ClientFactory, tokenizer: PreTrainedTokenizerBase) -> None:
    client = connect()
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    neighbour = client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    good = [cross_entropy(tokenizer.encode(TEXT))]
    bad = {
        "unknown loss": (good, "no_such_loss", "loss_fn"),
        "token out of vocabulary": ([cross_entropy([1, 2, 99999])], "cross_entropy", "model_input|target_tokens"),
        "missing input": (good, "importance_sampling", "advantages|logprobs"),
        "wrong shape": (
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints([1, 2, 3]),
                    loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray([1, 2]))},
                )
            ],
            "cross_entropy",
            "target_tokens",
        ),
    }
    for data, loss, field in bad.values():
        failing = trainer.forward_backward(data, loss)  # type: ignore[arg-type]
        passing = neighbour.forward_backward(good, "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match=field):
            failing.result()
        assert passing.result().metrics["loss:sum"] > 0
    assert trainer.forward_backward(good, "cross_entropy").result().metrics["loss:sum"] > 0
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
