"""A server whose base model is a mixture of experts, and whose operator refuses `train_mlp`: the unmodified SDK trains
an adapter and samples from real vLLM.

The tests share one server and run in the order of this file.
"""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl.base.tiny import moe
from skyrl.cli.demo.server import DemoServer
from tests.own_experts import own_experts
from tests.servers import ready

from .conftest import ask, cross_entropy, find_process
from .test_checkpoints import archive_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KEY = "tml-mixture"
OPTIONS = {
    "trainer.policy.model.lora.train_mlp_of_mixtures": "refuse",
    "generator.inference_engine.engine_init_kwargs": {"enable_return_routed_experts": True},
}
TEXT = "The old fox watches the river at dawn, and a small boat goes down to the sea."
STEP = types.AdamParams(learning_rate=1e-2)
LARGEST_GAP = 1e-4
"""Nats. Trainer and sampler compute in float32 with different kernels; measured: 3e-6."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("mixture")
    moe.make(directory)
    return str(directory)


@pytest.fixture(scope="module")
def mixture(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    flags = ("--base-model", model, "--served-model-name", "mixture")
    running = DemoServer(tmp_path_factory.mktemp("server"), *flags, backend_config=OPTIONS)
    with ready(running):
        yield running


@pytest.fixture(scope="module")
def client(mixture: DemoServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=mixture.url, api_key=KEY) as made:
        yield made


@pytest.fixture(scope="module")
def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="mixture", rank=8, seed=1, train_mlp=False).result()


@pytest.fixture
def tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(TEXT)


def _trained(trainer: tinker.TrainingClient, data: types.Datum) -> np.ndarray:
    """The trainer's logprobs of the targets."""
    output = trainer.forward([data], "cross_entropy").result().loss_fn_outputs[0]
    return output["logprobs"].to_numpy().astype(np.float64)


def _with_experts(tokens: list[int], experts: np.ndarray) -> types.Datum:
    datum = cross_entropy(tokens)
    inputs = {**datum.loss_fn_inputs, "routed_experts": types.TensorData.from_numpy(experts)}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def test_a_script_that_asks_for_the_mlp_gets_an_error_that_says_what_to_send(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="lora_config.train_mlp.*send train_mlp=False"):
        client.create_lora_training_client(base_model="mixture", rank=8).result()


def test_an_adapter_is_trained_and_sampled(trainer: tinker.TrainingClient, tokens: list[int]) -> None:
    losses = []
    for _ in range(3):
        passed = trainer.forward_backward([cross_entropy(tokens)], "cross_entropy")
        stepped = trainer.optim_step(STEP)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    assert losses[2] < losses[1] < losses[0]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    gap = np.abs(np.asarray(found[1:], np.float64) - _trained(trainer, cross_entropy(tokens)))
    assert gap.max() < LARGEST_GAP
    params = types.SamplingParams(max_tokens=24, temperature=1.0, stop=[], seed=3)
    answer = sampler.sample(types.ModelInput.from_ints(tokens[:9]), 1, params).result().sequences[0]
    trained = _trained(trainer, cross_entropy([*tokens[:9], *answer.tokens]))[8:]
    assert answer.logprobs is not None
    assert np.abs(np.asarray(answer.logprobs) - trained).max() < LARGEST_GAP


def test_the_checkpoint_gives_the_same_logprobs_in_peft(
    mixture: DemoServer, trainer: tinker.TrainingClient, model: str, tokens: list[int], tmp_path: Path
) -> None:
    path = trainer.save_weights_for_sampler("adapter").result().path
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, str(archive_of(mixture, path, tmp_path, KEY)))
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logits = adapted(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
    expected = logits.gather(1, ids[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(_trained(trainer, cross_entropy(tokens)), expected, atol=1e-4)


def test_routed_experts_are_replayed_and_wrong_ones_fail_their_pass_alone(
    trainer: tinker.TrainingClient, model: str, tokens: list[int]
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    own = own_experts(stock, torch.tensor(tokens[:-1])).numpy()
    rolled = (own + 1) % moe.EXPERTS
    free = _trained(trainer, cross_entropy(tokens))
    assert np.abs(_trained(trainer, _with_experts(tokens, rolled)) - free).max() > 0.05
    unrecorded = np.full_like(own, -1)
    np.testing.assert_allclose(_trained(trainer, _with_experts(tokens, unrecorded)), free, atol=1e-5)
    wrong = trainer.forward([_with_experts(tokens, rolled[:-1])], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\]: loss_fn_inputs.routed_experts: must be \[N"):
        wrong.result()
    np.testing.assert_array_equal(_trained(trainer, cross_entropy(tokens)), free)


def test_a_pass_with_routed_experts_is_repeated_after_the_trainer_was_killed(
    mixture: DemoServer, client: tinker.ServiceClient, model: str, tokens: list[int]
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    experts = (own_experts(stock, torch.tensor(tokens[:-1])).numpy() + 1) % moe.EXPERTS
    found = []
    for dies in (False, True):
        trainer = client.create_lora_training_client(base_model="mixture", rank=8, seed=2, train_mlp=False).result()
        trainer.forward_backward([_with_experts(tokens, experts)], "cross_entropy").result()
        if dies:
            os.kill(find_process(mixture, "skyrl.engine.main").pid, signal.SIGKILL)
        trainer.optim_step(STEP).result()
        found.append(_trained(trainer, cross_entropy(tokens)))
    np.testing.assert_array_equal(found[0], found[1])
    assert ask(mixture, "SELECT count(*) FROM models WHERE status = 'failed'") == [(0,)]


def test_an_agent_session_replays_the_experts_of_all_its_turns(
    mixture: DemoServer, client: tinker.ServiceClient, model: str
) -> None:
    """Sampler and trainer compute in float32, so that both routers choose the same experts, up to equal scores."""
    with httpx.Client(base_url=mixture.url, headers={"X-API-Key": KEY}, trust_env=False, timeout=60) as tenant:
        made = tenant.post("/api/v1/agent_sessions", json={"model": "mixture", "routed_experts": True}).json()
        agent = openai.OpenAI(base_url=f"{made['base_url']}/v1", api_key=made["key"], max_retries=0)
        messages: list[Any] = [{"role": "user", "content": TEXT}]
        for more in ("And then?", "And at night?"):
            answer = agent.chat.completions.create(model="any", messages=messages, max_tokens=12)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": more}]
        path = f"/api/v1/agent_sessions/{made['session_id']}"
        (row,) = tenant.get(f"{path}/trajectory", params={"advantage": 1.0}).json()["rows"]
        turns = tenant.get(f"{path}/turns").json()["rows"]
    rows = [np.load(io.BytesIO(base64.b64decode(turn["routed_experts"]))) for turn in turns]
    assert len(rows[1]) == len(turns[1]["added_tokens"]) + len(turns[1]["sampled_tokens"]), "what is known is not sent"
    tokens = row["model_input"]["chunks"][0]["tokens"]
    inputs = {
        name: types.TensorData.from_numpy(np.array(value["data"], value["dtype"]).reshape(value["shape"]))
        for name, value in row["loss_fn_inputs"].items()
    }
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    own = own_experts(stock, torch.tensor(tokens)).numpy()
    np.testing.assert_array_equal(np.sort(np.concatenate(rows), axis=-1), np.sort(own, axis=-1))
    sampled, logprobs = inputs.pop("mask").to_numpy() > 0, inputs["logprobs"].to_numpy()
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    trainer = client.create_lora_training_client(base_model="mixture", rank=8, seed=3, train_mlp=False).result()
    trained = trainer.forward_backward([datum], "importance_sampling").result().loss_fn_outputs[0]["logprobs"]
    assert np.abs(trained.to_numpy() - logprobs)[sampled].max() < LARGEST_GAP
