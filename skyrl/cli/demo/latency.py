"""The latency of a sample through the SDK: while training is idle, and during a training stream."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tinker
from tinker import types

from skyrl.base.tiny.corpus import TASKS, chat_prompt

STREAM_STEPS = 24


@dataclass(frozen=True)
class Latency:
    """Seconds. `stream` is the duration of the training stream, `busy` the latencies of samples during the stream."""

    idle: list[float]
    busy: list[float]
    stream: float

    @staticmethod
    def quantile(values: list[float], q: float) -> float:
        return float(np.quantile(values, q))

    @property
    def ratio(self) -> float:
        """The median latency during the stream, divided by the stream's duration."""
        return self.quantile(self.busy, 0.5) / self.stream


def stream_data(sequences: int, length: int) -> list[types.Datum]:
    """Cross-entropy data of random tokens: `sequences` sequences of `length` tokens."""
    rng = random.Random(1)
    data = []
    for _ in range(sequences):
        tokens = [rng.randrange(300, 500) for _ in range(length + 1)]
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
                    "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
                },
            )
        )
    return data


def _client(base_url: str, name: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=base_url, api_key=f"tml-demo-{name}")


def measure(
    base_url: str, base_model: str, *, idle_samples: int = 20, sequences: int = 32, length: int = 128
) -> Latency:
    """One client samples while another client trains: STREAM_STEPS times forward_backward and optim_step, all submitted
    at once."""
    with _client(base_url, "stream") as training, _client(base_url, "reader") as sampling:
        trainer = training.create_lora_training_client(base_model=base_model, rank=8).result()
        tokenizer = trainer.get_tokenizer()
        reader = sampling.create_lora_training_client(base_model=base_model, rank=8).result()
        sampler = reader.save_weights_and_get_sampling_client().result()
        task = TASKS["count"]
        rng = random.Random(2)

        def sample() -> float:
            prompt = tokenizer.encode(chat_prompt(task.prompt(rng)[0]))
            params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[])
            began = time.perf_counter()
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
            return time.perf_counter() - began

        data = stream_data(sequences, length)
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        sample()
        idle = [sample() for _ in range(idle_samples)]
        began = time.perf_counter()
        stream = []
        for _ in range(STREAM_STEPS):
            stream.append(trainer.forward_backward(data, "cross_entropy"))
            stream.append(trainer.optim_step(types.AdamParams(learning_rate=1e-4)))
        with ThreadPoolExecutor(1) as waiter:
            trained = waiter.submit(lambda: ([future.result() for future in stream], time.perf_counter())[1])
            busy = []
            while not trained.done():
                latency = sample()
                if not trained.done() or not busy:
                    busy.append(latency)
            return Latency(idle, busy, trained.result() - began)
