"""Repeats a tenant's training on a server without faults, and checks the tenant's samples against it.

The samples cannot be drawn again bit for bit, because vLLM's rounding depends on the other samples of a batch. So the
recorded batches of the tenant are trained on again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tinker

from skyrl.cli.demo.rl import datum
from tests.chaos import training
from tests.chaos.journal import Sample, Step

TOLERANCE = 1e-3
"""The largest allowed difference of a logprob between vLLM and the trainer, as in the other tests that compare them."""


@dataclass
class Comparison:
    """`wrong` counts samples whose logprobs differ by more than TOLERANCE from those of the weights that they should
    come from. `largest` is the largest difference of one token. `apart` holds, for each step, the largest difference
    from the weights of the next step: samples from wrong weights would differ so much. `differing` lists steps with
    other answers than without faults."""

    steps: int = 0
    samples: int = 0
    wrong: int = 0
    largest: float = 0.0
    apart: list[float] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)


def replay(
    service: tinker.ServiceClient, seed: int, steps: Sequence[Step], learning_rate: float
) -> tuple[Comparison, str]:
    """Train as the tenant did; returns the comparison and the path of the final state."""
    trainer = training.new_trainer(service, seed)
    samples_of_version: dict[int, list[Sample]] = defaultdict(list)
    for step in steps:
        for sample in step.samples:
            samples_of_version[sample.version].append(sample)
    comparison, saved = Comparison(steps=len(steps)), dict[str, str]()
    for index, step in enumerate(steps):
        if index and steps[index - 1].answers:
            comparison.apart.append(max(_differences(trainer, samples_of_version[index - 1])))
        differences = _differences(trainer, samples_of_version[index])
        comparison.samples += len(differences)
        comparison.wrong += sum(difference > TOLERANCE for difference in differences)
        comparison.largest = max([comparison.largest, *differences])
        if training.train(trainer, step, learning_rate) != step.answers:
            comparison.differing.append(index)
        trainer = training.save_or_load(service, trainer, step, saved)
    return comparison, trainer.save_state(training.FINAL).result().path


def _differences(trainer: tinker.TrainingClient, samples: Sequence[Sample]) -> list[float]:
    """For each sample, the largest difference of a token's logprob from the logprob of the trainer's weights now."""
    data = [datum(sample.prompt, sample.tokens, sample.logprobs, 0.0) for sample in samples]
    answer = trainer.forward(data, "ppo").result()
    largest = []
    for sample, output in zip(samples, answer.loss_fn_outputs, strict=True):
        ours = np.asarray(output["logprobs"].data[len(sample.prompt) - 1 :])
        largest.append(float(np.abs(ours - np.asarray(sample.logprobs)).max()))
    return largest
