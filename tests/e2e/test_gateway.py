"""`--backend none`: a gateway, which only samples, in front of an external vLLM (here the vLLM of the shared
server)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tinker
from openai import OpenAI
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

from .conftest import greedy, vllm_of

pytestmark = pytest.mark.vllm


@pytest.fixture
def gateway(server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    url, key = vllm_of(server)
    with ready(
        DemoServer(
            tmp_path_factory.mktemp("gateway"),
            *("--backend", "none", "--base-model", "tiny"),
            *("--external-inference-url", url),
            *("--external-inference-api-key", key),
        )
    ) as running:
        yield running


def test_a_gateway_samples_and_does_not_train(gateway: DemoServer, tokenizer: PreTrainedTokenizerBase) -> None:
    with tinker.ServiceClient(base_url=gateway.url, api_key="tml-test") as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        prompt = tokenizer.encode("The old")
        sampled = greedy(sampler, prompt)
        assert greedy(sampler, prompt) == sampled
        ids: Any = {"ignore_eos": True, "return_token_ids": True}
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="tml-test", max_retries=0) as openai:
            answer: Any = openai.completions.create(
                model="tiny", prompt=prompt, max_tokens=12, temperature=0, extra_body=ids
            )
            assert answer.choices[0].token_ids == sampled
        with pytest.raises(tinker.RequestFailedError, match="9999"):
            sampler.sample(
                types.ModelInput.from_ints([9999]), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)
            ).result()
        # The gateway knows neither the context length nor whether this vLLM has skyrl's plugin.
        long = types.ModelInput.from_ints([5] * 4086)
        open_ended = types.SamplingParams(max_tokens=None, stop=[])
        assert len(sampler.sample(long, num_samples=1, sampling_params=open_ended).result().sequences[0].tokens) == 10
        with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k: needs skyrl's plugin"):
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                num_samples=1,
                sampling_params=types.SamplingParams(max_tokens=1),
                prompt_alt_tokens_k=1,
            ).result()
        with pytest.raises(tinker.BadRequestError, match="only samples"):
            client.create_lora_training_client(base_model="tiny", rank=4).result()
