"""Training on the real server: learning works, checkpoints resume, and a mistake affects no other request."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import TASKS
from skyrl.cli.demo.rl import Settings, Step
from skyrl.cli.demo.rl import train as train_rl

from .conftest import ClientFactory, cross_entropy, train

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."


def test_reinforcement_learning_raises_the_reward(connect: ClientFactory) -> None:
    steps: list[Step] = []
    settings = Settings(steps=18, prompts=8, group=8, epochs=1, learning_rate=3e-3)
    train_rl(connect(), "tiny", TASKS["count"], settings, steps.append)
    rewards = [step.reward for step in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


def test_supervised_training_lowers_the_loss(connect: ClientFactory, tokenizer: PreTrainedTokenizerBase) -> None:
    trainer = connect().create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    # At three times this learning rate a few seeds diverge within ten steps.
    losses = train(trainer, [cross_entropy(tokenizer.encode(TEXT))], 10, 3e-3)
    assert losses[-1] < losses[0] / 2


def test_a_model_is_named_after_its_session(connect: ClientFactory) -> None:
    trainer = connect().create_lora_training_client(base_model="tiny", rank=4).result()
    info = trainer.get_info()
    session, _, number = info.model_id.partition(":train:")
    assert session
    assert number == "0"
    assert info.lora_rank == 4
    assert len(trainer.get_tokenizer()) == 512


def test_a_run_resumed_with_its_optimizer_continues_exactly(
    connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    client = connect()
    data = [cross_entropy(tokenizer.encode(TEXT))]
    trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=5).result()
    train(trainer, data, 4, 1e-2)
    saved = trainer.save_state("half").result().path
    whole = train(trainer, data, 4, 1e-2)
    other = connect()
    resumed = other.create_training_client_from_state_with_optimizer(saved).result()
    assert train(resumed, data, 4, 1e-2) == whole
    without = other.create_training_client_from_state(saved).result()
    fresh = train(without, data, 4, 1e-2)
    assert fresh[0] == whole[0]
    assert fresh[1:] != whole[1:]


def test_a_custom_loss_trains_the_model(connect: ClientFactory, tokenizer: PreTrainedTokenizerBase) -> None:
    trainer = connect().create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    tokens = tokenizer.encode(TEXT)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64))},
        )
    ]

    def loss(_: list[types.Datum], logprobs: list) -> tuple:  # type: ignore[type-arg]
        value = -(logprobs[0].sum())
        return value, {"mine": float(value.detach())}

    first = trainer.forward_backward_custom(data, loss).result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    second = trainer.forward_backward_custom(data, loss).result()
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]


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
