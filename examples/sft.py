"""Supervised fine-tuning on a running `skyrl serve`: the model learns to sort letters, then sorts new ones.

Uses the Tinker SDK and a task to learn. Set TINKER_BASE_URL to use another server.
"""

from __future__ import annotations

import argparse
import os
import random

import numpy as np
import tinker
from tinker import types

from skyrl.base.tiny.corpus import IM_END, SortTask, chat_prompt


def example(prompt: list[int], answer: list[int]) -> types.Datum:
    """Data for next-token prediction: input position i predicts token i + 1. Only the answer's tokens have a weight."""
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
            "weights": types.TensorData.from_numpy(np.asarray(weights, np.float32)),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    task, rng = SortTask(), random.Random(0)
    api_key = os.environ.get("TINKER_API_KEY", "tml-sft-example")

    with tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service:
        trainer = service.create_lora_training_client(base_model=options.base_model, rank=8, seed=1).result()
        tokenizer = trainer.get_tokenizer()
        for step in range(options.steps):
            data = []
            for _ in range(16):
                question, state = task.prompt(rng)
                answer = tokenizer.encode(task.answer(state) + IM_END)
                data.append(example(tokenizer.encode(chat_prompt(question)), answer))
            # Send both commands before waiting for the first one; the server keeps their order.
            training_pass = trainer.forward_backward(data, "cross_entropy")
            optimizer_step = trainer.optim_step(types.AdamParams(learning_rate=3e-3))
            trained_tokens = sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data)
            loss = training_pass.result().metrics["loss:sum"] / trained_tokens
            optimizer_step.result()
            if step % 5 == 0 or step == options.steps - 1:
                print(f"step {step:3d}  loss per token {loss:.4f}")

        checkpoint = trainer.save_state("sorted").result().path
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=32, temperature=0.0)
        rewards = []
        for _ in range(8):
            question, state = task.prompt(rng)
            prompt = types.ModelInput.from_ints(tokenizer.encode(chat_prompt(question)))
            answer = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0]
            text = str(tokenizer.decode(answer.tokens))
            rewards.append(task.reward(state, text))
            print(f"{question} -> {text.removesuffix(IM_END)}")
        print(f"mean reward {np.mean(rewards):.2f}; training continues from {checkpoint}")


if __name__ == "__main__":
    main()
