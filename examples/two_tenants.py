"""Two tenants on one server: each trains its own adapter by reinforcement learning at the same time.

Each tenant has its own API key, so it cannot see the other's models. Samples go to vLLM without the trainer, so no
sample waits for the other tenant's training. Uses the Tinker SDK and two tasks with a reward.
"""

from __future__ import annotations

import argparse
import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tinker
from tinker import types

from skyrl.base.tiny.corpus import TASKS, Task, chat_prompt

PROMPTS, GROUP = 8, 4


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """One sampled answer as data for the importance-sampling loss. The prompt's positions have advantage 0."""
    assert sequence.logprobs is not None
    tokens, prompt_positions = list(sequence.tokens), len(prompt) - 1
    logprobs = [0.0] * prompt_positions + list(sequence.logprobs)
    advantages = [0.0] * prompt_positions + [advantage] * len(tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(prompt[1:] + tokens, np.int64)),
            "logprobs": types.TensorData.from_numpy(np.asarray(logprobs, np.float32)),
            "advantages": types.TensorData.from_numpy(np.asarray(advantages, np.float32)),
        },
    )


def train(base_url: str, base_model: str, api_key: str, task: Task, steps: int) -> list[float]:
    """Train with the advantage (reward - mean) / standard deviation within each group. Returns the mean reward of every
    step."""
    rewards: list[float] = []
    with tinker.ServiceClient(base_url=base_url, api_key=api_key) as service:
        trainer = service.create_lora_training_client(base_model=base_model, rank=8, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        params = types.SamplingParams(max_tokens=32, temperature=1.0)
        rng = random.Random(0)
        for step in range(steps):
            sampler = trainer.save_weights_and_get_sampling_client().result()
            questions = [task.prompt(rng) for _ in range(PROMPTS)]
            prompts = [tokenizer.encode(chat_prompt(question)) for question, _ in questions]
            answers = [
                sampler.sample(types.ModelInput.from_ints(prompt), num_samples=GROUP, sampling_params=params)
                for prompt in prompts
            ]
            data: list[types.Datum] = []
            graded: list[float] = []
            for prompt, (_, state), answer in zip(prompts, questions, answers, strict=True):
                group = answer.result().sequences
                scores = np.asarray([task.reward(state, str(tokenizer.decode(sample.tokens))) for sample in group])
                graded += scores.tolist()
                if scores.std() > 0:
                    advantages = (scores - scores.mean()) / scores.std()
                    data += [
                        datum(prompt, sample, float(advantage))
                        for sample, advantage in zip(group, advantages, strict=True)
                    ]
            if data:
                training_pass = trainer.forward_backward(data, "importance_sampling")
                optimizer_step = trainer.optim_step(types.AdamParams(learning_rate=3e-3))
                training_pass.result()
                optimizer_step.result()
            rewards.append(float(np.mean(graded)))
            print(f"{task.name:6s} step {step:3d}  reward {rewards[-1]:.3f}", flush=True)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with ThreadPoolExecutor(2) as pool:
        running = {
            name: pool.submit(
                train, options.base_url, options.base_model, f"tml-tenant-{name}", TASKS[name], options.steps
            )
            for name in ("count", "sort")
        }
        for name, future in running.items():
            rewards = future.result()
            window = max(1, len(rewards) // 4)
            print(f"{name}: reward {np.mean(rewards[:window]):.3f} -> {np.mean(rewards[-window:]):.3f}")


if __name__ == "__main__":
    main()
