"""Sampling on the real server: which server answers, from which weights, and that a sample never waits for training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer

from .conftest import ClientFactory, cross_entropy, greedy, train
from .long_pass import sample_ends_first

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."
OTHER = "A quiet owl remembers the small horse near the mill."


def test_a_sample_ends_while_a_long_pass_runs(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    """On a server that colocates, the sample waits for the pass: see test_colocated.py."""
    trainer = connect().create_lora_training_client(base_model="tiny", rank=8).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert sample_ends_first(server, trainer, sampler, tokenizer.encode(TEXT))


def test_64_concurrent_samples_each_come_from_their_own_weights(
    connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    client = connect()
    prompt = tokenizer.encode("The old")
    samplers = [client.create_sampling_client(base_model="tiny").result()]
    for seed, text in enumerate((TEXT, OTHER)):
        trainer = client.create_lora_training_client(base_model="tiny", rank=4 * (seed + 1), seed=seed).result()
        train(trainer, [cross_entropy(prompt + tokenizer.encode(text))], 8, 2e-2)
        samplers.append(trainer.save_weights_and_get_sampling_client().result())
    alone = [greedy(sampler, prompt) for sampler in samplers]
    assert len({tuple(tokens) for tokens in alone}) == 3
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda i: greedy(samplers[i % 3], prompt), range(64)))
    assert together == [alone[i % 3] for i in range(64)]


def test_a_sampling_client_keeps_its_weights_while_training_goes_on(
    connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    client = connect()
    trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    prompt = tokenizer.encode("The old")
    old = trainer.save_weights_and_get_sampling_client().result()
    before = greedy(old, prompt)
    train(trainer, [cross_entropy(prompt + tokenizer.encode(OTHER))], 8, 2e-2)
    named = trainer.save_weights_for_sampler(name="trained").result()
    new = client.create_sampling_client(model_path=named.path).result()
    after = greedy(new, prompt)
    assert after != before
    assert greedy(old, prompt) == before
    assert greedy(trainer.save_weights_and_get_sampling_client().result(), prompt) == after


def test_trainer_and_sampler_agree_on_logprobs(connect: ClientFactory, tokenizer: PreTrainedTokenizerBase) -> None:
    client = connect()
    tokens = tokenizer.encode(TEXT + " " + OTHER)
    trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()

    def trained_logprobs() -> np.ndarray:
        output = trainer.forward([cross_entropy(tokens)], "cross_entropy").result()
        return np.asarray(output.loss_fn_outputs[0]["logprobs"].data)

    def sampled_logprobs(sampler: object) -> np.ndarray:
        values = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()  # type: ignore[attr-defined]
        assert values[0] is None
        return np.asarray(values[1:], np.float64)

    base = sampled_logprobs(client.create_sampling_client(base_model="tiny").result())
    np.testing.assert_allclose(trained_logprobs(), base, atol=1e-3)
    fresh = sampled_logprobs(trainer.save_weights_and_get_sampling_client().result())
    np.testing.assert_allclose(trained_logprobs(), fresh, atol=1e-3)
    train(trainer, [cross_entropy(tokens)], 5, 1e-2)
    after = sampled_logprobs(trainer.save_weights_and_get_sampling_client().result())
    np.testing.assert_allclose(trained_logprobs(), after, atol=1e-3)
    assert np.abs(after - base).max() > 0.1


def test_the_logprobs_of_samples_equal_the_trainers(connect: ClientFactory, tokenizer: PreTrainedTokenizerBase) -> None:
    client = connect()
    trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = tokenizer.encode("The old")
    params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[], seed=3)
    answer = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=3, sampling_params=params).result()
    data = [cross_entropy(prompt + list(sequence.tokens)) for sequence in answer.sequences]
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    for sequence, output in zip(answer.sequences, outputs, strict=True):
        assert sequence.logprobs is not None
        given = np.asarray(output["logprobs"].data)[len(prompt) - 1 :]
        np.testing.assert_allclose(given, np.asarray(sequence.logprobs), atol=1e-3)
