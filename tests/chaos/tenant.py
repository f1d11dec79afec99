"""One tenant as a process: does RL with the SDK until a line comes on stdin, and writes each step into a journal.

Usage: python -m tests.chaos.tenant URL KEY KIND SEED LEARNING_RATE JOURNAL. Prints "ready" when it has a model, and
"done" with the path of the final state at the end. Then it keeps its session alive until stdin ends, so that the course
can read the results of the session again.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from skyrl.cli.demo.rl import advantages
from tests.chaos import journal, training
from tests.chaos.journal import Sample, Step
from tests.chaos.kinds import KINDS, Rl

SAVE_EVERY, LOAD_EVERY = 3, 8
"""In steps. Every LOAD_EVERY steps the tenant goes on from one of its saved states."""


@dataclass
class Tenant:
    """Does RL of a kind. The seed alone determines the questions and the order of saves and loads."""

    service: tinker.ServiceClient
    trainer: tinker.TrainingClient
    rl: Rl
    seed: int
    learning_rate: float
    file: Path

    def train(self) -> str:
        """Make steps, at least one, until told to end; returns the path of the final state."""
        trainer, rl = self.trainer, self.rl
        tokenizer = trainer.get_tokenizer()
        saved: dict[str, str] = {}
        older: tinker.SamplingClient | None = None
        index = 0
        while not index or not journal.told_to_end():
            began, began_at = time.monotonic(), time.time()
            chance = random.Random(f"{self.seed}/{index}")
            sampler = trainer.save_weights_and_get_sampling_client().result()
            questions = [rl.question(chance) for _ in range(rl.prompts)]
            prompts = [list(tokenizer.encode(text)) for text, _ in questions]
            step = Step(began_at=began_at, saved=f"at-{index}" if index % SAVE_EVERY == 1 else None)
            if index % LOAD_EVERY == LOAD_EVERY - 1:
                step.loaded = chance.choice(sorted(saved))
            pending = [self._ask(sampler, prompt, rl.group) for prompt in prompts]
            for prompt, (_, state), answer in zip(prompts, questions, pending, strict=True):
                group = sampled(index, prompt, answer)
                step.samples += group
                rewards = [rl.task.reward(state, str(tokenizer.decode(sample.tokens))) for sample in group]
                for sample, advantage in zip(group, _never_all_zero(advantages(rewards)), strict=True):
                    if advantage:
                        step.data.append((prompt, sample.tokens, sample.logprobs, advantage))
            older_pending = [] if older is None else [(prompt, self._ask(older, prompt, 1)) for prompt in prompts]
            trained_from = time.monotonic()
            step.answers = training.train(trainer, step, self.learning_rate)
            step.train_s = (time.monotonic() - trained_from) / training.EPOCHS
            for prompt, answer in older_pending:
                step.samples += sampled(index - 1, prompt, answer)
            trainer = training.save_or_load(self.service, trainer, step, saved)
            step.seconds = time.monotonic() - began
            journal.append(self.file, step)
            older = sampler
            index += 1
        return trainer.save_state(training.FINAL).result().path

    def _ask(self, sampler: tinker.SamplingClient, prompt: list[int], count: int) -> Any:
        params = types.SamplingParams(max_tokens=self.rl.tokens, temperature=1.0)
        return sampler.sample(types.ModelInput.from_ints(prompt), num_samples=count, sampling_params=params)


def _never_all_zero(values: list[float]) -> list[float]:
    """Of a group in which all answers are as good, some answer gets an advantage, so that each step trains."""
    return values if any(values) else [1.0 - 2.0 * (number % 2) for number in range(len(values))]


def sampled(version: int, prompt: list[int], answer: Any) -> list[Sample]:
    """Wait for an answer and return its sequences."""
    samples = []
    for sequence in answer.result().sequences:
        assert sequence.logprobs is not None
        samples.append(Sample(version, prompt, list(sequence.tokens), list(sequence.logprobs)))
    return samples


def main() -> None:
    url, key, kind, seed, learning_rate, file = sys.argv[1:]
    rl = KINDS[kind]
    assert rl is not None
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        trainer = training.new_trainer(service, int(seed))
        print("ready", flush=True)
        tenant = Tenant(service, trainer, rl, int(seed), float(learning_rate), Path(file))
        final = tenant.train()
        print("done", final, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
