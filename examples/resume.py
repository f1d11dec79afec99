"""A training loop that resumes after any interruption: run it again with the same name.

Every few steps it saves weights and optimizer for a week, under the number of the step. At the start it looks for the
newest save of its name among all training runs. Uses the Tinker SDK and a task to learn.
"""

from __future__ import annotations

import argparse
import os
import random

import numpy as np
import tinker
from tinker import types

from skyrl.base.tiny.corpus import IM_END, SortTask, chat_prompt

WEEK_S = 7 * 24 * 3600


def newest_save(rest: tinker.RestClient, name: str) -> types.Checkpoint | None:
    """The last saved state of all training runs with this name. Each resumed loop is another training run."""
    found: list[types.Checkpoint] = []
    offset = 0
    while True:
        page = rest.list_training_runs(limit=100, offset=offset).result()
        runs = [run for run in page.training_runs if (run.user_metadata or {}).get("name") == name]
        found += [run.last_checkpoint for run in runs if run.last_checkpoint is not None]
        offset += len(page.training_runs)
        if not page.training_runs or offset >= page.cursor.total_count:
            return max(found, key=lambda checkpoint: checkpoint.time, default=None)


def batch(task: SortTask, step: int, tokenizer) -> list[types.Datum]:
    """The data of a step. It depends only on the step, so a resumed loop sees the same data."""
    rng, data = random.Random(step), []
    for _ in range(8):
        question, state = task.prompt(rng)
        prompt, answer = tokenizer.encode(chat_prompt(question)), tokenizer.encode(task.answer(state) + IM_END)
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        inputs = {
            "target_tokens": types.TensorData.from_numpy(np.asarray(prompt[1:] + answer, np.int64)),
            "weights": types.TensorData.from_numpy(np.asarray(weights, np.float32)),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(prompt + answer[:-1]), loss_fn_inputs=inputs))
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--name", default="sorting", help="The common name of all runs of this loop.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    api_key = os.environ.get("TINKER_API_KEY", "tml-resume-example")
    metadata = {"name": options.name}
    saved = newest_save(tinker.RestClient(base_url=options.base_url, api_key=api_key), options.name)

    with tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service:
        if saved is None:
            trainer = service.create_lora_training_client(
                base_model=options.base_model, rank=8, seed=1, user_metadata=metadata
            ).result()
            start = 0
        else:
            trainer = service.create_training_client_from_state_with_optimizer(
                saved.tinker_path, user_metadata=metadata
            ).result()
            start = int(saved.tinker_path.rpartition("-")[2])
            print(f"resumed from {saved.tinker_path}")
        tokenizer = trainer.get_tokenizer()
        for step in range(start, options.steps):
            training_pass = trainer.forward_backward(batch(SortTask(), step, tokenizer), "cross_entropy")
            optimizer_step = trainer.optim_step(types.AdamParams(learning_rate=2e-3))
            print(f"step {step:3d}  loss {training_pass.result().metrics['loss:sum']:.4f}", flush=True)
            optimizer_step.result()
            if (step + 1) % options.save_every == 0:
                path = trainer.save_state(f"step-{step + 1:06d}", ttl_seconds=WEEK_S).result().path
                print(f"saved {path}", flush=True)


if __name__ == "__main__":
    main()
