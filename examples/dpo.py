"""DPO: train a model to prefer right answers to sloppy ones, with a loss that the client computes.

`forward_backward_custom` gets logprobs from the server, differentiates the loss here and sends the gradient back. The
base model is the reference policy. Uses the Tinker SDK, torch and a task.
"""

from __future__ import annotations

import argparse
import os
import random

import numpy as np
import tinker
import torch
from tinker import types

from skyrl.base.tiny.corpus import IM_END, TASKS, chat_prompt

BETA = 0.2
PAIRS = 12


def datum(prompt: list[int], answer: list[int]) -> types.Datum:
    """One answer. Its tokens have weight 1; the loss below uses the weights to find them."""
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + answer[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(prompt[1:] + answer, np.int64)),
            "weights": types.TensorData.from_numpy(np.asarray(weights, np.float32)),
        },
    )


def answer_logprobs(data: list[types.Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The log-probability of each whole answer, [len(data)]."""
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
    return torch.stack([(weight * logprob).sum() for weight, logprob in zip(weights, logprobs, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    task, rng = TASKS["sort"], random.Random(0)
    api_key = os.environ.get("TINKER_API_KEY", "tml-dpo-example")

    with tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service:
        trainer = service.create_lora_training_client(base_model=options.base_model, rank=8, seed=0).result()
        base = service.create_sampling_client(base_model=options.base_model).result()
        tokenizer = trainer.get_tokenizer()
        for step in range(options.steps):
            data: list[types.Datum] = []  # chosen, rejected, chosen, rejected...
            for _ in range(PAIRS):
                question, state = task.prompt(rng)
                chosen, rejected = task.answer(state), task.sloppy(rng, state)
                prompt = tokenizer.encode(chat_prompt(question))
                if chosen != rejected:
                    data += [datum(prompt, tokenizer.encode(text + IM_END)) for text in (chosen, rejected)]
            sequences = [
                pair.model_input.to_ints() + [int(pair.loss_fn_inputs["target_tokens"].data[-1])] for pair in data
            ]
            futures = [base.compute_logprobs(types.ModelInput.from_ints(tokens)) for tokens in sequences]
            # The first token has no logprob. Without it, logprobs and target_tokens have the same positions.
            scores = [torch.tensor(future.result()[1:], dtype=torch.float32) for future in futures]
            reference = answer_logprobs(data, scores)

            def dpo(
                data: list[types.Datum], logprobs: list[torch.Tensor], reference: torch.Tensor = reference
            ) -> tuple[torch.Tensor, dict[str, float]]:
                margin = BETA * (answer_logprobs(data, logprobs) - reference)
                difference = margin[0::2] - margin[1::2]
                loss = -torch.nn.functional.logsigmoid(difference).mean()
                return loss, {"accuracy:mean": float((difference > 0).float().mean())}

            training_pass = trainer.forward_backward_custom(data, dpo)
            optimizer_step = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
            metrics = training_pass.result().metrics
            optimizer_step.result()
            print(f"step {step:3d}  loss {metrics['loss:sum']:.4f}  chosen preferred {metrics['accuracy:mean']:.2f}")


if __name__ == "__main__":
    main()
