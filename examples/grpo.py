"""GRPO with a reference policy: sample a group of answers to each question, reward the better ones, and stay near the
base model.

The advantage of a token is its answer's reward, normalised within the group, minus KL_COEFFICIENT * log(policy /
reference). At the end two versions of the weights are compared. Uses the Tinker SDK and a task with a reward.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random

import numpy as np
import tinker
from tinker import types

from skyrl.base.tiny.corpus import TASKS, Task, chat_prompt

QUESTIONS, GROUP, UPDATES = 4, 8, 2
KL_COEFFICIENT = 0.02
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # bounds of the ratio: an epsilon of 0.2


def tensor(values: list[float], dtype: type = np.float32) -> types.TensorData:
    return types.TensorData.from_numpy(np.asarray(values, dtype))


async def group_data(
    task: Task,
    question: tuple[str, object],
    policy: tinker.SamplingClient,
    base: tinker.SamplingClient,
    tokenizer,
    seed: int,
) -> tuple[list[types.Datum], list[float]]:
    """Sample a group of answers to one question. Returns them as data for the ppo loss, and their rewards. Sample i of
    the group uses the seed `seed + i`."""
    prompt = tokenizer.encode(chat_prompt(question[0]))
    params = types.SamplingParams(max_tokens=32, temperature=1.0, seed=seed)
    sampled = await policy.sample(types.ModelInput.from_ints(prompt), num_samples=GROUP, sampling_params=params)
    answers = [list(sequence.tokens) for sequence in sampled.sequences]
    rewards = [task.reward(question[1], str(tokenizer.decode(answer))) for answer in answers]
    spread = float(np.std(rewards))
    if spread == 0:
        return [], rewards  # all rewards are equal, so no answer is better
    # The base model's logprob of each token, from one request per answer. The prompt's tokens come first.
    scored = await asyncio.gather(
        *(base.compute_logprobs(types.ModelInput.from_ints(prompt + answer)) for answer in answers)
    )
    data = []
    for sequence, answer, reference, reward in zip(sampled.sequences, answers, scored, rewards, strict=True):
        assert sequence.logprobs is not None
        prompt_zeros = [0.0] * (len(prompt) - 1)  # the advantage of the prompt's positions is 0, so they do not count
        drift = np.asarray(sequence.logprobs) - np.asarray(reference[len(prompt) :], np.float64)
        advantage = (reward - np.mean(rewards)) / spread - KL_COEFFICIENT * drift
        inputs = {
            "target_tokens": tensor([*prompt[1:], *answer], np.int64),
            "logprobs": tensor([*prompt_zeros, *sequence.logprobs]),
            "advantages": tensor([*prompt_zeros, *advantage]),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(prompt + answer[:-1]), loss_fn_inputs=inputs))
    return data, rewards


async def grade(task: Task, sampler: tinker.SamplingClient, tokenizer) -> float:
    """The mean reward of 4 answers to each of 24 questions. All versions get the same questions and seeds."""
    rng = random.Random("held out")
    questions = [task.prompt(rng) for _ in range(24)]
    answers = await asyncio.gather(
        *(
            sampler.sample(
                types.ModelInput.from_ints(tokenizer.encode(chat_prompt(question))),
                num_samples=4,
                sampling_params=types.SamplingParams(max_tokens=32, temperature=1.0, seed=1000 * index),
            )
            for index, (question, _) in enumerate(questions)
        )
    )
    rewards = [
        task.reward(state, str(tokenizer.decode(sequence.tokens)))
        for (_, state), answer in zip(questions, answers, strict=True)
        for sequence in answer.sequences
    ]
    return float(np.mean(rewards))


async def run(service: tinker.ServiceClient, base_model: str, steps: int) -> None:
    task, rng = TASKS["count"], random.Random(0)
    trainer = await service.create_lora_training_client(base_model=base_model, rank=8, seed=0)
    base = await service.create_sampling_client(base_model=base_model)
    tokenizer = trainer.get_tokenizer()
    first = (await trainer.save_weights_for_sampler("start")).path
    for step in range(steps):
        policy = await trainer.save_weights_and_get_sampling_client()
        questions = [task.prompt(rng) for _ in range(QUESTIONS)]
        groups = await asyncio.gather(
            *(
                group_data(task, question, policy, base, tokenizer, GROUP * (QUESTIONS * step + number))
                for number, question in enumerate(questions)
            )
        )
        data = [datum for group, _ in groups for datum in group]
        if data:
            # Send all updates before waiting for the first one; the server keeps their order.
            pending = []
            for _ in range(UPDATES):
                pending.append(trainer.forward_backward(data, "ppo", CLIP))
                pending.append(trainer.optim_step(types.AdamParams(learning_rate=2e-3)))
            results = await asyncio.gather(*pending)
            last_pass = results[-2].metrics  # it shows how far the updates moved from the sampler
            kl = last_pass["kl:sum"] / last_pass["active_tokens:sum"]
            rewards = [reward for _, graded in groups for reward in graded]
            print(f"step {step:3d}  reward {np.mean(rewards):.3f}  kl {kl:+.4f}", flush=True)
    last = (await trainer.save_weights_for_sampler("end")).path
    for path in (first, last):
        sampler = await service.create_sampling_client(model_path=path)
        print(f"{path}: reward {await grade(task, sampler, tokenizer):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    api_key = os.environ.get("TINKER_API_KEY", "tml-grpo-example")
    with tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service:
        asyncio.run(run(service, options.base_model, options.steps))


if __name__ == "__main__":
    main()
