"""A separate server with `colocate_all: true`: samples run in the engine's loop. The last test checks what the end of
the server leaves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

from .conftest import ask, cross_entropy, greedy, train
from .long_pass import sample_ends_first
from .reference import Reference

pytestmark = pytest.mark.vllm

CONTEXT = 2048
"""The model itself takes 4,096 tokens."""


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with ready(
        DemoServer(
            tmp_path_factory.mktemp("colocated"),
            backend_config={
                "trainer": {"placement": {"colocate_all": True}},
                "generator": {"inference_engine": {"max_model_len": CONTEXT}},
            },
        )
    ) as running:
        yield running


def test_samples_run_as_engine_commands(colocated: DemoServer, tokenizer: PreTrainedTokenizerBase) -> None:
    with tinker.ServiceClient(base_url=colocated.url, api_key="tml-test") as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        prompt = tokenizer.encode("The old")
        before = greedy(trainer.save_weights_and_get_sampling_client().result(), prompt)
        train(trainer, [cross_entropy(prompt + tokenizer.encode("cat cat cat cat cat"))], 8, 2e-2)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        assert greedy(sampler, prompt) != before
        with pytest.raises(tinker.BadRequestError, match="prompt"):
            sampler.sample(
                types.ModelInput.from_ints([9999]), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)
            ).result()
    kinds = dict(ask(colocated, "select kind, count(*) from futures group by kind"))
    assert kinds["SAMPLE"] == 2
    assert "EXTERNAL" not in kinds


def test_the_engine_scores_prompts(colocated: DemoServer) -> None:
    prompt, ids = [5, 6, 7], np.asarray([[1, -1], [2, 3]])
    logprobs = Reference().logprobs(prompt)
    with tinker.ServiceClient(base_url=colocated.url, api_key="tml-test") as client:
        answer = (
            client.create_sampling_client(base_model="tiny")
            .result()
            .sample(
                types.ModelInput.from_ints(prompt),
                num_samples=1,
                sampling_params=types.SamplingParams(max_tokens=1, temperature=0.0),
                target_prompt_logprobs=types.TensorData.from_numpy(ids),
                prompt_alt_tokens_k=2,
            )
            .result()
        )
    assert answer.target_prompt_logprobs is not None
    expected = np.where(ids >= 0, np.take_along_axis(logprobs, ids.clip(0), 1), 0.0)
    np.testing.assert_allclose(answer.target_prompt_logprobs.to_numpy(), expected, atol=1e-4)
    assert answer.prompt_alt_tokens is not None
    assert (answer.prompt_alt_tokens.tokens.to_numpy() == logprobs.argmax(1)[:, None]).all()


def test_a_full_context_is_told_with_the_key_that_bounds_it(colocated: DemoServer) -> None:
    with tinker.ServiceClient(base_url=colocated.url, api_key="tml-test") as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        assert len(greedy(sampler, [5] * (CONTEXT - 1), 1)) == 1
        with pytest.raises(tinker.BadRequestError, match="max_model_len") as refused:
            greedy(sampler, [5] * CONTEXT, 1)
    assert "the model itself takes 4096" in str(refused.value)


def test_a_sample_waits_for_the_running_pass(colocated: DemoServer, tokenizer: PreTrainedTokenizerBase) -> None:
    """With the same measurement, test_sampling.py shows the opposite for a server that does not colocate."""
    with tinker.ServiceClient(base_url=colocated.url, api_key="tml-test") as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=8).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        assert not sample_ends_first(colocated, trainer, sampler, tokenizer.encode("The old"))


def test_the_end_of_the_server_clears_its_row_and_leaves_no_process(colocated: DemoServer) -> None:
    family = [psutil.Process(colocated.pid), *psutil.Process(colocated.pid).children(recursive=True)]
    assert len(family) >= 4
    colocated.stop()
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert ask(colocated, "select inference_proxy_url, training_ready from engine_state") == [(None, 0)]
