"""Processes die while a client works: the client only waits longer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.demo.server import DemoServer

from .conftest import SLOW_START_S, ClientFactory, cross_entropy, find_process, greedy, train

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."


def test_a_killed_engine_loses_no_training_and_no_samples(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    client = connect()
    data = [cross_entropy(tokenizer.encode(TEXT))]
    twin = client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
    uninterrupted = train(twin, data, 8, 1e-2)
    trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
    before = train(trainer, data, 4, 1e-2)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = tokenizer.encode("The old")
    expected = greedy(sampler, prompt)
    find_process(server, "skyrl.engine.main").kill()
    assert greedy(sampler, prompt) == expected
    after = train(trainer, data, 4, 1e-2)
    assert before + after == uninterrupted


def test_a_killed_engine_of_vllm_loses_no_samples(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    """vLLM's API server lives a moment longer than its engine. tests/faults/test_vllm_replaced.py kills the API
    server."""
    trainer = connect().create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    prompt = tokenizer.encode("The old")
    train(trainer, [cross_entropy(prompt + tokenizer.encode(TEXT))], 4, 2e-2)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    expected = greedy(sampler, prompt)
    with ThreadPoolExecutor(8) as pool:
        in_flight = [pool.submit(greedy, sampler, prompt, 1500) for _ in range(4)]
        while server.status()["samples"]["in_flight"] < 4:
            time.sleep(0.01)
        find_process(server, "EngineCore").kill()
        assert greedy(sampler, prompt) == expected
        assert len({tuple(sample.result()) for sample in in_flight}) == 1
    server.wait_ready(SLOW_START_S)
