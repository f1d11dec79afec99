"""The steps of `benchmarks.real_step` in TRL's GRPOTrainer, with its own generation on a CPU.

    PYTHON -m benchmarks.trl_step SETTINGS

PYTHON is that of an environment with trl 1.16, which needs neither this package nor the Tinker SDK. SETTINGS is JSON:
model, rank, seed, steps, prompts, group, max_tokens, learning_rate, threads; and `more` keys of GRPOConfig. Before each
step it waits for a line of its input; after each it writes `step ` and JSON: seconds of `sample` (generation and
rewards) and of `train` (the rest), and the mean `reward`. `real_step --trl PYTHON` runs it.

All samples of a step are one batch, without a reference model; nothing is recomputed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.sums import questions, reward


class Turns(TrainerCallback):
    """Waits for its turn before a step, and tells its seconds after it."""

    sampling_s, mean_reward = 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        sys.stdin.readline()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole = time.perf_counter() - self.began
        told = {"sample": self.sampling_s, "train": whole - self.sampling_s, "reward": self.mean_reward}
        print("step", json.dumps(told), flush=True)


class Timed(GRPOTrainer):
    turns: Turns

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        self.turns.sampling_s = time.perf_counter() - began
        return found


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    turns = Turns()

    def graded(completions: Any, answer: Any, **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        rewards = [reward(completion[0]["content"], expected) for completion, expected in pairs]
        turns.mean_reward = sum(rewards) / len(rewards)
        return rewards

    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for step in range(settings["steps"])
        for question, answer in questions(settings["seed"], step, settings["prompts"])
    ]
    samples = settings["prompts"] * settings["group"]
    with tempfile.TemporaryDirectory() as directory:
        keys = {
            "output_dir": directory,
            "use_cpu": True,
            "bf16": False,
            "seed": settings["seed"],
            "max_steps": settings["steps"],
            "per_device_train_batch_size": samples,
            "gradient_accumulation_steps": 1,
            "num_generations": settings["group"],
            "max_completion_length": settings["max_tokens"],
            "learning_rate": settings["learning_rate"],
            "lr_scheduler_type": "constant",
            "temperature": 1.0,
            "beta": 0.0,
            "gradient_checkpointing": False,
            "shuffle_dataset": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        config = GRPOConfig(**(keys | settings.get("more", {})))
        lora = LoraConfig(r=settings["rank"], lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = Timed(
            AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            reward_funcs=[graded],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            peft_config=lora,
            callbacks=[turns],
        )
        trainer.turns = turns
        trainer.train()


if __name__ == "__main__":
    main()
