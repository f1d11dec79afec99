"""PPO with a critic by the unmodified SDK: the value loss falls, and the head is saved, loaded and never sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from .conftest import ClientFactory

PROMPT, ANSWERS = [5, 6, 7, 8], ([9, 10, 11, 12], [30, 31, 32], [9, 10, 40, 41, 42])
HEAD = {"value_head": "true"}
STEP = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)


def episode(answer: list[int], **arrays: np.ndarray) -> types.Datum:
    """One sampled answer. Its first token decides the reward, which comes with the last one."""
    text = PROMPT + answer
    mask = np.arange(len(text) - 1) >= len(PROMPT) - 1
    rewards = np.zeros(len(mask), np.float32)
    rewards[-1] = 1.0 if answer[0] == 9 else -1.0
    inputs: dict[str, Any] = {
        "target_tokens": np.asarray(text[1:], np.int64),
        "mask": mask.astype(np.float32),
        "rewards": rewards,
        **arrays,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=inputs)


def scored(trainer: tinker.TrainingClient) -> list[types.Datum]:
    """The episodes with logprobs and values from before the updates, as one forward pass gives both."""
    bare = [
        types.Datum(
            model_input=types.ModelInput.from_ints((PROMPT + answer)[:-1]),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray((PROMPT + answer)[1:]))},
        )
        for answer in ANSWERS
    ]
    outputs = trainer.forward(bare, "cross_entropy").result().loss_fn_outputs
    return [
        episode(answer, logprobs=np.asarray(output["logprobs"].data), values=np.asarray(output["values"].data))
        for answer, output in zip(ANSWERS, outputs, strict=True)
    ]


def values_of(trainer: tinker.TrainingClient) -> list[float]:
    outputs = trainer.forward_backward(scored(trainer), "ppo").result().loss_fn_outputs
    return np.concatenate([each["values"].data for each in outputs]).tolist()


def test_a_program_trains_policy_and_critic_and_goes_on_from_a_checkpoint(connect: ClientFactory) -> None:
    client = connect()
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=1, user_metadata=HEAD).result()
    losses: list[float] = []
    for _ in range(8):
        data = scored(trainer)
        config = {"value_clip": 0.5, "value_coef": 1.0, "gae_lambda": 1.0}
        sent = [(trainer.forward_backward(data, "ppo", config), trainer.optim_step(STEP)) for _ in range(2)]
        losses += [passed.result().metrics["value_loss:mean"] for passed, _ in sent]
        assert all((stepped.result().metrics or {})["grad_norm"] > 0 for _, stepped in sent)
    assert losses[0] == pytest.approx(0.5), "values begin at 0, and every return is 1 or -1"
    assert losses[-1] < 0.5 * losses[0]
    learned = values_of(trainer)
    path = trainer.save_state("critic").result().path
    for load in (client.create_training_client_from_state, client.create_training_client_from_state_with_optimizer):
        loaded = load(path).result()
        np.testing.assert_allclose(values_of(loaded), learned, atol=1e-5)


def test_a_critic_begins_with_a_checkpoint_that_has_none_and_its_weights_are_sampled(connect: ClientFactory) -> None:
    client = connect()
    plain = client.create_lora_training_client(base_model="tiny", rank=4).result()
    path = plain.save_state("plain").result().path
    trainer = client.create_training_client_from_state(path, user_metadata=HEAD).result()
    assert set(values_of(trainer)) == {0.0}
    trainer.optim_step(STEP).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=2)).result()
    assert len(answer.sequences[0].tokens) == 2


@pytest.mark.parametrize("value", ["yes", "True", ""])
def test_a_wrong_value_of_the_key_is_refused_at_once(connect: ClientFactory, value: str) -> None:
    with pytest.raises(tinker.BadRequestError, match="user_metadata.value_head: must be 'true' or 'false'"):
        connect().create_lora_training_client(base_model="tiny", user_metadata={"value_head": value}).result()


def test_what_a_model_without_a_head_is_sent_for_a_critic_fails(connect: ClientFactory) -> None:
    trainer = connect().create_lora_training_client(base_model="tiny", rank=4).result()
    data = [episode(ANSWERS[0], logprobs=np.zeros(7, np.float32), values=np.zeros(7, np.float32))]
    with pytest.raises(tinker.RequestFailedError, match="values, rewards, mask need a value head"):
        trainer.forward_backward(data, "ppo").result()
