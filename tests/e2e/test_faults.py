"""Processes die while a client works: the client only waits longer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import APIError, OpenAI
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer
from tests.servers import SLOW_START_S

from .conftest import ClientFactory, cross_entropy, find_process, greedy, train

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."


@pytest.mark.slow
def test_a_killed_engine_of_vllm_loses_no_samples_and_no_openai_request_that_got_nothing_yet(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    """vLLM's API server lives a moment longer than its engine. tests/faults/test_vllm_replaced.py kills the API
    server. An OpenAI stream that has begun ends with an error."""
    trainer = connect().create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    prompt = tokenizer.encode("The old")
    train(trainer, [cross_entropy(prompt + tokenizer.encode(TEXT))], 4, 2e-2)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    expected = greedy(sampler, prompt)
    path = trainer.save_weights_for_sampler(name="saved").result().path
    asked: dict[str, Any] = {"model": path, "prompt": prompt, "temperature": 0}
    ids: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="tml-test", max_retries=0) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        stream = client.completions.create(**asked, max_tokens=3500, stream=True, extra_body=ids)
        events = iter(stream)
        next(events)
        in_flight = [pool.submit(greedy, sampler, prompt, 1500) for _ in range(4)]
        while server.status()["samples"]["in_flight"] < 4:
            time.sleep(0.01)
        find_process(server, "EngineCore").kill()
        answer: Any = client.completions.create(**asked, max_tokens=12, extra_body=ids)
        assert answer.choices[0].token_ids == expected
        with pytest.raises(APIError) as broken:
            list(events)
        assert broken.value.code == "inference_failed"
        assert greedy(sampler, prompt) == expected
        assert len({tuple(sample.result()) for sample in in_flight}) == 1
    server.wait_ready(SLOW_START_S)
