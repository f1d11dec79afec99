"""The same training on a server that nothing happens to, and what it says of the samples.

What was sampled cannot be drawn again bit for bit: vLLM rounds differently in other company. So the tenants' recorded
batches are trained on, as they were built.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tinker

from skyrl.demo.rl import datum
from tests.chaos import training
from tests.chaos.journal import Sample, Step

TOLERANCE = 1e-3
"""Between vLLM's logprobs and the trainer's, as in the other tests that compare them."""


@dataclass
class Comparison:
    """`wrong`: samples whose logprobs are not those of the weights they should be from. `largest` is the largest
    difference of one token; `apart` is the same, step by step, with the weights of the step after: what samples from
    wrong weights would show. `differing`: steps in which something else was answered."""

    steps: int = 0
    samples: int = 0
    wrong: int = 0
    largest: float = 0.0
    apart: list[float] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)


def replay(service: tinker.ServiceClient, seed: int, steps: Sequence[Step]) -> tuple[Comparison, str]:
    """Train as the tenant did; returns how it compares, and the path of the final state."""
    trainer = training.new_trainer(service, seed)
    drawn: dict[int, list[Sample]] = defaultdict(list)
    for step in steps:
        for sample in step.samples:
            drawn[sample.version].append(sample)
    found, saved = Comparison(steps=len(steps)), dict[str, str]()
    for index, step in enumerate(steps):
        if index and steps[index - 1].told:
            found.apart.append(max(_differences(trainer, drawn[index - 1])))
        differences = _differences(trainer, drawn[index])
        found.samples += len(differences)
        found.wrong += sum(difference > TOLERANCE for difference in differences)
        found.largest = max([found.largest, *differences])
        if training.train(trainer, step) != step.told:
            found.differing.append(index)
        trainer = training.save_or_load(service, trainer, step, saved)
    return found, trainer.save_state(training.FINAL).result().path


def _differences(trainer: tinker.TrainingClient, samples: Sequence[Sample]) -> list[float]:
    """The largest difference of a token's logprob from what the weights say now, of each sample."""
    data = [datum(sample.prompt, sample.tokens, sample.logprobs, 0.0) for sample in samples]
    answer = trainer.forward(data, "ppo").result()
    found = []
    for sample, output in zip(samples, answer.loss_fn_outputs, strict=True):
        ours = np.asarray(output["logprobs"].data[len(sample.prompt) - 1 :])
        found.append(float(np.abs(ours - np.asarray(sample.logprobs)).max()))
    return found
