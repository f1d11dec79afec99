"""Tenants that do reinforcement learning on a real cluster, in one process with the unmodified SDK, for `check`.

A step is as in `tenants.Learning`: samples from the weights of the step before, passes with an optimizer step, a save.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import tinker
from tinker import types

from benchmarks.series import quantile
from benchmarks.simulation.tenants import Learning
from skyrl.cli.demo.run import stream_data

ADAM = types.AdamParams(learning_rate=1e-4)
SEQUENCES, LENGTH = 8, 128
"""Of each pass."""


@dataclass
class Steps:
    """Of all tenants, in seconds: how long each step's samples, its training and its save took."""

    samples: list[float] = field(default_factory=list[float])
    trained: list[float] = field(default_factory=list[float])
    saved: list[float] = field(default_factory=list[float])

    def medians(self) -> dict[str, float]:
        return {name: quantile(getattr(self, name), 0.5) for name in ("samples", "trained", "saved")}


def learn(url: str, tenants: int, learning: Learning, seconds: float) -> Steps:
    """Run so many tenants beside each other, each for so many seconds after its first step, which is not measured."""
    found = Steps()
    data = stream_data(SEQUENCES, LENGTH)
    prompt = types.ModelInput.from_ints(list(range(1, 65)))
    params = types.SamplingParams(max_tokens=64, temperature=1.0, seed=1)

    def tenant(number: int) -> None:
        with tinker.ServiceClient(base_url=url, api_key=f"tml-learner-{number}") as client:
            model = client.create_lora_training_client(base_model="tiny", rank=8).result()
            sampler = model.save_weights_and_get_sampling_client().result()
            end = float("inf")
            while (began := time.perf_counter()) < end:
                for each in [sampler.sample(prompt, 1, params) for _ in range(learning.samples)]:
                    each.result()
                sampled = time.perf_counter()
                waiting = [model.forward_backward(data, "cross_entropy") for _ in range(learning.passes)]
                step = model.optim_step(ADAM)
                for each in waiting:
                    each.result()
                step.result()
                trained = time.perf_counter()
                sampler = model.save_weights_and_get_sampling_client().result()
                saved = time.perf_counter()
                if end == float("inf"):
                    end = saved + seconds
                    continue
                found.samples.append(sampled - began)
                found.trained.append(trained - sampled)
                found.saved.append(saved - trained)

    with ThreadPoolExecutor(tenants) as threads:
        list(threads.map(tenant, range(tenants)))
    return found
