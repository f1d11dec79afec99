"""Sampling on the real server: which server answers, from which weights, and that a sample never waits for training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer

from .conftest import ClientFactory, ask, cross_entropy, greedy, train
from .long_pass import sample_ends_first

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."
OTHER = "A quiet owl remembers the small horse near the mill."


def kinds(server: DemoServer) -> dict[str, int]:
    return dict(ask(server, "select kind, count(*) from futures group by kind"))


def test_the_engine_state_holds_the_inference_url_after_a_save(server: DemoServer, connect: ClientFactory) -> None:
    trainer = connect().create_lora_training_client(base_model="tiny", rank=4).result()
    trainer.save_weights_and_get_sampling_client().result()
    (url, generation), *rest = ask(server, "select inference_proxy_url, generation from engine_state")
    assert not rest
    assert url.startswith("http://127.0.0.1:")
    assert generation >= 1


def test_a_sample_is_a_forwarded_future_and_not_an_engine_command(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    before = kinds(server)
    sampler = connect().create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=4, temperature=1.0)
    sampler.sample(types.ModelInput.from_ints(tokenizer.encode(TEXT)), num_samples=2, sampling_params=params).result()
    after = kinds(server)
    assert after["EXTERNAL"] == before.get("EXTERNAL", 0) + 1
    assert "SAMPLE" not in after


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


def test_stop_tokens_and_stop_strings_end_a_sample(connect: ClientFactory, tokenizer: PreTrainedTokenizerBase) -> None:
    sampler = connect().create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(tokenizer.encode(chat_prompt("sort: d,a,c,x,k,m,z,b,t")))

    def sample(stop: object, max_tokens: int = 40) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)  # type: ignore[arg-type]
        return sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0]

    ended = sample(None)
    assert ended.stop_reason == "stop"
    assert list(ended.tokens)[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    endless = sample([])
    assert endless.stop_reason == "length"
    assert len(endless.tokens) == 40
    middle = list(ended.tokens)[1]
    by_id = sample([middle])
    assert list(by_id.tokens)[-1] == middle
    assert list(by_id.tokens).count(middle) == 1
    by_text = sample([tokenizer.decode([middle])])
    assert list(by_text.tokens) == list(by_id.tokens)
    assert by_text.stop_reason == "stop"
    special = sample(["<|im_end|>"])
    assert list(special.tokens) == list(ended.tokens)


def test_seeds_repeat_samples_and_greedy_samples_are_equal(
    connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    sampler = connect().create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(tokenizer.encode("The old"))

    def sample(seed: int | None, temperature: float) -> list[tuple[int, ...]]:
        params = types.SamplingParams(max_tokens=16, temperature=temperature, seed=seed, stop=[])
        answer = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
        return [tuple(sequence.tokens) for sequence in answer.sequences]

    first = sample(2**64 - 1, 1.0)
    assert len(set(first)) > 1
    assert sample(2**64 - 1, 1.0) == first
    assert sample(7, 1.0) != first
    alike = sample(None, 0.0)
    assert len(alike) == 4
    assert len(set(alike)) == 1
