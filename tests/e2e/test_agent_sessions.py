"""Agent sessions on the real server, with unmodified OpenAI and Anthropic clients: exact tokens in and out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer

from .conftest import COMPLETED, RUNNING, cross_entropy, in_vllm, train, until

pytestmark = pytest.mark.vllm

KEY = "tml-agents"
TASK: list[Any] = [{"role": "user", "content": "Who watches the river?"}]
CONTEXT = 4096
"""Of the tiny model, in tokens."""


@dataclass
class Agent:
    """A session, and clients that have nothing but its key and address."""

    id: str
    key: str
    url: str
    tenant: httpx.Client

    @property
    def openai(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    @property
    def anthropic(self) -> Any:
        return anthropic.Anthropic(base_url=self.url, auth_token=self.key, api_key=None, max_retries=0)

    def say(self, messages: list[Any], **more: Any) -> list[Any]:
        """The conversation with the answer of one more turn."""
        answer = self.openai.chat.completions.create(model="any", messages=messages, **{"max_tokens": 6} | more)
        return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

    def post(self, messages: list[Any], headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        body = {"model": "any", "messages": messages, "max_tokens": 6, **more}
        headers = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)

    def turns(self) -> list[dict[str, Any]]:
        return self.get("/turns")["rows"]

    def get(self, path: str = "", **query: Any) -> dict[str, Any]:
        answer = self.tenant.get(f"/api/v1/agent_sessions/{self.id}{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def tenant(server: DemoServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"X-API-Key": KEY}, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
def agent(tenant: httpx.Client) -> Agent:
    return agent_of(tenant)


def agent_of(tenant: httpx.Client, **options: Any) -> Agent:
    answer = tenant.post("/api/v1/agent_sessions", json={"model": "tiny", **options})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    return Agent(made["session_id"], made["key"], made["base_url"], tenant)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_turn_continues_the_tokens_of_the_turn_before(agent: Agent, tokenizer: PreTrainedTokenizerBase) -> None:
    said = agent.say(TASK)
    agent.say([*said, user("And at night?")])
    first, second = agent.turns()
    assert second["parent"] == first["id"]
    assert second["fork"] is None
    whole = [part for turn in (first, second) for part in (turn["added_tokens"], turn["sampled_tokens"])]
    text = str(tokenizer.decode([token for part in whole for token in part]))
    closing = "" if first["finish_reason"] == "stop" else "<|im_end|>"
    opening = "<|im_start|>user\nWho watches the river?<|im_end|>\n<|im_start|>assistant\n"
    assert text.startswith(f"{opening}{said[1]['content']}")
    assert f"{closing}\n<|im_start|>user\nAnd at night?<|im_end|>\n<|im_start|>assistant\n" in text
    assert second["usage"]["prompt"] == sum(map(len, whole[:3]))


def test_the_logprobs_are_those_under_which_the_tokens_were_sampled(
    agent: Agent, connect: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    agent.say(agent.say(TASK, temperature=0.7) + [user("And at night?")], temperature=1.0)
    row = agent.get("/trajectory", format="samples")["rows"][0]
    sampler = connect(KEY).create_sampling_client(base_model="tiny").result()
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(row["tokens"])).result()
    (_, second) = agent.turns()
    sampled = len(second["sampled_tokens"])
    np.testing.assert_allclose(logprobs[-sampled:], row["rollout_log_probs"][-sampled:], atol=2e-2)
    assert row["loss_mask"][-sampled:] == [1] * sampled


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_under_a_grammar_are_the_models_own(agent: Agent, connect: Any, stream: bool) -> None:
    """The grammar forces words that the model would never say: under it each token has about the logprob 0."""
    free = [*agent.say(TASK, temperature=1.0), user("Say a word.")]
    shape: dict[str, Any] = {"structured_outputs": {"choice": ["Zebra quartz", "Zebra vortex"]}}
    answer = agent.post(free, temperature=1.0, max_tokens=32, logprobs=True, top_logprobs=2, stream=stream, **shape)
    assert answer.status_code == 200, answer.text
    first, second = agent.turns()
    assert "constrained" not in first
    assert "own_logprobs" not in second
    assert second["constrained"] == [1] * len(second["sampled_tokens"])
    (row,) = agent.get("/trajectory", format="samples")["rows"]
    sampled = len(second["sampled_tokens"])
    sampler = connect(KEY).create_sampling_client(base_model="tiny").result()
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(row["tokens"])).result()
    own = np.array(logprobs[-sampled:], np.float32)
    assert own.min() < -4, "the grammar must force something"
    np.testing.assert_allclose(own, row["rollout_log_probs"][-sampled:], atol=2e-2)
    assert row["loss_mask"][-sampled:] == row["metadata"]["constrained"][-sampled:] == [1] * sampled
    assert row["metadata"]["constrained"][: len(first["sampled_tokens"])] == [0] * len(first["sampled_tokens"])
    if not stream:
        told = answer.json()["choices"][0]["logprobs"]["content"]
        assert all(each["constrained"] for each in told)
        np.testing.assert_allclose(own, [each["logprob"] for each in told], atol=2e-2)


def test_datums_train_as_they_are(agent: Agent, connect: Any) -> None:
    agent.say(agent.say(TASK) + [user("And at night?")])
    (row,) = agent.get("/trajectory", advantage=1.0)["rows"]
    inputs = {name: types.TensorData(**tensor) for name, tensor in row["loss_fn_inputs"].items() if name != "mask"}
    tokens = row["model_input"]["chunks"][0]["tokens"]
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    trainer = connect(KEY).create_lora_training_client(base_model="tiny", rank=4).result()
    result = trainer.forward_backward([datum], "importance_sampling").result()
    mask = np.array(row["loss_fn_inputs"]["mask"]["data"], bool)
    ours = np.array(result.loss_fn_outputs[0]["logprobs"].to_numpy())[mask]
    np.testing.assert_allclose(ours, np.array(row["loss_fn_inputs"]["logprobs"]["data"])[mask], atol=0.05)


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
def test_the_end_of_a_session_stops_an_answer_that_its_client_has_left(
    tenant: httpx.Client, server: DemoServer, route: str
) -> None:
    """Neither is the answer sampled to its end, nor does it get into the trajectory."""
    asked = {"input": TASK} if route == "responses" else {"messages": TASK, "max_tokens": CONTEXT // 2}
    until(lambda: in_vllm(server, RUNNING) == 0)
    completed = in_vllm(server, COMPLETED)
    body = {"model": "any", "stream": True, "temperature": 1.0, **asked}
    agent = agent_of(tenant, sampling={"ignore_eos": True})
    headers = {"Authorization": f"Bearer {agent.key}"}
    with httpx.stream(
        "POST", f"{agent.url}/v1/{route}", json=body, headers=headers, timeout=60, trust_env=False
    ) as left:
        assert left.status_code == 200
        next(left.iter_lines())
    until(lambda: in_vllm(server, RUNNING) == 1)
    assert agent.tenant.post(f"/api/v1/agent_sessions/{agent.id}/end").status_code == 200
    until(lambda: in_vllm(server, RUNNING) == 0)
    assert in_vllm(server, COMPLETED) == completed
    assert agent.turns() == []
    assert agent.get()["end_reason"] == "called"


def test_a_cut_answer_is_continued_token_by_token(agent: Agent) -> None:
    first = agent.anthropic.messages.create(
        model="any", max_tokens=4, messages=TASK, extra_body={"stop_sequences": ["~~"]}
    )
    prefill = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    agent.anthropic.messages.create(model="any", max_tokens=4, messages=[*TASK, prefill])
    turns = agent.turns()
    if first.stop_reason == "max_tokens":
        assert turns[1]["parent"] == turns[0]["id"]
        assert turns[1]["added_tokens"] == []


def test_a_pinned_session_keeps_its_weights_and_another_follows_the_newest(connect: Any, tenant: httpx.Client) -> None:
    trainer: tinker.TrainingClient = connect(KEY).create_lora_training_client(base_model="tiny", rank=4).result()
    path = trainer.save_weights_for_sampler(name="first").result().path
    run = path.removesuffix("/sampler_weights/first")
    pinned, following = agent_of(tenant, model=path), agent_of(tenant, model=run, follows="newest")
    before = [one.say(TASK) for one in (pinned, following)]
    train(trainer, [cross_entropy(list(range(20, 40)))], 1, 1e-3)
    trainer.save_weights_for_sampler(name="second").result()
    for one, said in zip((pinned, following), before, strict=True):
        one.say([*said, user("And at night?")])
    versions = [[turn["versions"][0]["version"] for turn in one.turns()] for one in (pinned, following)]
    assert versions[0][0] == versions[0][1] == versions[1][0]
    assert versions[1][1] != versions[1][0]


def test_the_other_dialects_speak_of_the_same_session(agent: Agent) -> None:
    with agent.anthropic.messages.stream(
        model="any", max_tokens=6, system=[{"type": "text", "text": "Be kind."}], messages=TASK
    ) as stream:
        first = stream.get_final_message()
    more: list[Any] = [*TASK, {"role": "assistant", "content": first.content}, user("And at night?")]
    agent.anthropic.messages.create(model="any", max_tokens=6, system="Be kind.", messages=more)
    one = agent.openai.responses.create(model="any", input="Who keeps the mill?", max_output_tokens=6)
    agent.openai.responses.create(model="any", input="Why?", previous_response_id=one.id, max_output_tokens=6)
    turns = agent.turns()
    assert [turn["dialect"] for turn in turns] == ["messages", "messages", "responses", "responses"]
    assert [turn["parent"] for turn in turns] == [None, turns[0]["id"], None, turns[2]["id"]]
    counted = agent.anthropic.messages.count_tokens(model="any", system="Be kind.", messages=more)
    assert counted.input_tokens == turns[1]["usage"]["prompt"]
