"""A GRPO loop against the Tinker SDK, as a user would write it.

Knows the SDK and a task. Works with any server: TINKER_BASE_URL chooses it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tinker
from tinker import types

from skyrl.base.tiny.corpus import Task, chat_prompt


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of one run: `prompts` x `group` samples per step, `epochs` updates on each step's samples."""

    steps: int = 26
    prompts: int = 3
    group: int = 8
    epochs: int = 2
    learning_rate: float = 2e-3
    rank: int = 8
    max_tokens: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """The result of one step. `reward` is the mean over its samples; times are in seconds."""

    index: int
    reward: float
    samples: int
    sample_s: float
    train_s: float


def advantages(rewards: list[float]) -> list[float]:
    """Each reward minus the group's mean, divided by the group's standard deviation; 0 in a group of equal rewards."""
    values = np.asarray(rewards)
    spread = values.std()
    return [0.0] * len(rewards) if spread < 1e-6 else ((values - values.mean()) / spread).tolist()


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """One sampled answer for the PPO loss. Positions of the prompt have advantage 0, so they are not trained on."""
    before = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(prompt[1:] + tokens, np.int64)),
            "logprobs": types.TensorData.from_numpy(np.asarray([0.0] * before + logprobs, np.float32)),
            "advantages": types.TensorData.from_numpy(
                np.asarray([0.0] * before + [advantage] * len(tokens), np.float32)
            ),
        },
    )


def train(
    service: tinker.ServiceClient, base_model: str, task: Task, settings: Settings, on_step: Callable[[Step], None]
) -> None:
    """Run the loop, and call `on_step` after every step. Prompts depend only on the seed and the step."""
    trainer = service.create_lora_training_client(
        base_model=base_model, rank=settings.rank, seed=settings.seed
    ).result()
    tokenizer = trainer.get_tokenizer()
    for index in range(settings.steps):
        rng = random.Random(f"{settings.seed}/{index}")
        started = time.perf_counter()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        questions = [task.prompt(rng) for _ in range(settings.prompts)]
        prompts = [tokenizer.encode(chat_prompt(text)) for text, _ in questions]
        params = types.SamplingParams(max_tokens=settings.max_tokens, temperature=1.0)
        pending = [
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=settings.group, sampling_params=params)
            for prompt in prompts
        ]
        data: list[types.Datum] = []
        rewards: list[float] = []
        for prompt, (_, state), future in zip(prompts, questions, pending, strict=True):
            group = future.result().sequences
            graded = [task.reward(state, str(tokenizer.decode(sequence.tokens))) for sequence in group]
            rewards += graded
            for sequence, advantage in zip(group, advantages(graded), strict=True):
                if advantage:
                    assert sequence.logprobs is not None
                    data.append(datum(prompt, list(sequence.tokens), list(sequence.logprobs), advantage))
        sampled = time.perf_counter()
        if data:
            updates = []
            for _ in range(settings.epochs):
                updates.append(trainer.forward_backward(data, "ppo"))
                updates.append(trainer.optim_step(types.AdamParams(learning_rate=settings.learning_rate)))
            for update in updates:
                update.result()
        done = time.perf_counter()
        on_step(Step(index, float(np.mean(rewards)), len(rewards), sampled - started, done - sampled))
