"""Checkpoints behind an OpenAI client, on the real server: the unmodified `openai` SDK, and the exact requests of
lm-eval and verifiers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest
import tinker
from openai import OpenAI
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer

from .conftest import COMPLETED, RUNNING, cross_entropy, in_vllm, train, until

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."
OTHER = "A quiet owl remembers the small horse near the mill."
KEY = "tml-openai"
IDS: dict[str, Any] = {"return_token_ids": True}
CHAT: list[Any] = [{"role": "user", "content": "Where is the fox?"}]


@dataclass
class Run:
    """A run with two checkpoints of different weights, and sampling clients of both."""

    first: str
    second: str
    samplers: dict[str, tinker.SamplingClient]
    rest: tinker.RestClient

    @property
    def paths(self) -> tuple[str, str]:
        return self.first, self.second


@pytest.fixture(scope="module")
def run(server: DemoServer, tokenizer: PreTrainedTokenizerBase) -> Iterator[Run]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
        paths = []
        for name, text in (("first", TEXT), ("second", OTHER)):
            train(trainer, [cross_entropy(tokenizer.encode("The old " + text))], 6, 2e-2)
            paths.append(trainer.save_weights_for_sampler(name=name).result().path)
        samplers = {path: client.create_sampling_client(model_path=path).result() for path in paths}
        yield Run(paths[0], paths[1], samplers, rest_of(server))


USER = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}


def rest_of(server: DemoServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def client_of(server: DemoServer, key: str = KEY, prefix: str = "/oai/api/v1") -> OpenAI:
    return OpenAI(base_url=f"{server.url}{prefix}", api_key=key, max_retries=0)


@pytest.fixture
def client(server: DemoServer) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


# Weights


def test_two_checkpoints_of_a_run_answer_exactly_as_their_sampling_clients(
    client: OpenAI, run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = tokenizer.encode("The old")
    answers = {}
    for path in (*run.paths, f"tiny;{run.first}"):
        answer = client.completions.create(
            model=path, prompt=prompt, max_tokens=8, temperature=0, logprobs=0, extra_body=IDS | {"ignore_eos": True}
        )
        assert answer.model == path
        choice: Any = answer.choices[0]
        answers[path] = (choice.token_ids, choice.logprobs.token_logprobs)
        sampler = run.samplers[path.rpartition(";")[2]]
        params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        sampled = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
        (sequence,) = sampled.sequences
        assert choice.token_ids == list(sequence.tokens)
        assert choice.logprobs.token_logprobs == pytest.approx(sequence.logprobs, abs=1e-6)
    assert answers[run.first] != answers[run.second]
    assert answers[f"tiny;{run.first}"] == answers[run.first]


def test_a_checkpoint_saved_again_under_its_name_answers_with_the_new_weights(
    client: OpenAI, server: DemoServer, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = tokenizer.encode("The old")

    def answer(path: str) -> str:
        return client.completions.create(model=path, prompt=prompt, max_tokens=8, temperature=0).choices[0].text

    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client(base_model="tiny", rank=8, seed=2).result()
        path = trainer.save_weights_for_sampler(name="latest").result().path
        before = answer(path)
        train(trainer, [cross_entropy(tokenizer.encode("The old " + OTHER))], 6, 2e-2)
        rest_of(server).delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(openai.NotFoundError):
            answer(path)
        assert trainer.save_weights_for_sampler(name="latest").result().path == path
        assert answer(path) != before


# What an answer holds


def test_a_chat_of_several_choices_has_logprobs_and_repeats_with_its_seed(client: OpenAI, run: Run) -> None:
    def ask() -> Any:
        return client.chat.completions.create(
            model=run.first, messages=CHAT, max_tokens=6, n=2, seed=7, logprobs=True, top_logprobs=3, temperature=1.0
        )

    answer = ask()
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        content = choice.logprobs.content
        assert content
        assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
    assert [c.message.content for c in ask().choices] == [c.message.content for c in answer.choices]
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


def test_a_stream_joins_to_the_whole_answer(client: OpenAI, run: Run) -> None:
    asked: dict[str, Any] = {"model": run.second, "temperature": 0, "max_tokens": 12}
    whole: Any = client.chat.completions.create(messages=CHAT, **asked)
    usage: Any = {"include_usage": True}
    *events, last = client.chat.completions.create(messages=CHAT, **asked, stream=True, stream_options=usage)
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {event.model for event in (*events, last)} == {run.second}
    assert last.usage
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    text = client.completions.create(prompt="The old", **asked).choices[0].text
    pieces = client.completions.create(prompt="The old", **asked, stream=True)
    assert "".join(event.choices[0].text for event in pieces) == text


def test_a_response_format_holds(client: OpenAI, run: Run) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=run.first,
        messages=CHAT,
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    content = answer.choices[0].message.content or ""
    assert re.fullmatch(r'\s*\{[\s"n:12}]*', content), content  # a model as small as this may go on with white space


ODD_SHAPES: list[dict[str, Any]] = [
    {"json": {"type": "array", "minItems": 1_000_000}},
    {"json": {"type": "array", "items": {}, "minItems": 1_000_000}},
    {"json": {"type": "object", "minProperties": 1_000_000}},
    {"json": {"type": "integer", "multipleOf": 3}},
    {"json": {"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}},
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"$ref": "#/$defs/none"}},
    {"regex": r"[^\s\S]"},
    {"regex": "(((a|b){0,1000}c?){0,1000}d?){0,1000}"},
    {"regex": "("},
    {"grammar": "root ::= root"},
    {"grammar": "root ::= " + " ".join(['"a"?'] * 500)},
    {"grammar": "root ::="},
    {"choice": ["", "a"]},
    {"structural_tag": "{}"},
    {"json": {"type": "integer"}, "regex": "a"},
]


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=lambda shape: json.dumps(shape)[:60])
def test_an_odd_shape_of_the_answer_is_answered_or_refused_and_stops_nobody(
    server: DemoServer, shape: dict[str, Any]
) -> None:
    """vLLM's own choice of a library for grammars needed half a minute for some of these, in which it answered nobody,
    and failed for others."""

    def post(**fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "The old", "max_tokens": 4, "temperature": 0} | fields
        key = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=key, timeout=300, trust_env=False)

    answer = post(structured_outputs=shape)
    assert answer.status_code in (200, 400), answer.text
    assert post().status_code == 200


def test_lm_evals_request_for_loglikelihoods_has_the_logprobs_of_the_prompt(
    server: DemoServer, run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    """lm-eval 0.4.13, lm_eval/models/openai_completions.py, LocalCompletionsAPI: `_create_payload` makes this body, and
    `parse_logprobs` reads it like this."""
    prompts = [tokenizer.encode("The old " + text) for text in (TEXT, OTHER)]
    body = {"model": run.first, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json=body | {"echo": True},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=60,
        trust_env=False,
    ).json()
    context = 2
    for choice, tokens in zip(sorted(answer["choices"], key=lambda c: c["index"]), prompts, strict=True):
        logprobs = choice["logprobs"]
        scores = logprobs["token_logprobs"][context:-1]
        best = logprobs["top_logprobs"][context:-1]
        assert all(score <= max(row.values()) for score, row in zip(scores, best, strict=True))
        own = run.samplers[run.first].compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert scores == pytest.approx(own[context:], abs=1e-4)


def test_verifiers_finds_token_ids_and_logprobs_of_a_chat(client: OpenAI, run: Run) -> None:
    """tinker-cookbook, recipes/verifiers_rl/tinker_openai.py: the fields that verifiers reads for training."""
    answer: Any = client.chat.completions.create(
        model=run.first, messages=CHAT, max_tokens=6, logprobs=True, extra_body=IDS
    )
    (choice,) = answer.choices
    assert len(choice.token_ids) == len(choice.logprobs.content)
    again: Any = client.completions.create(
        model=run.first, prompt=answer.prompt_token_ids, max_tokens=1, logprobs=0, extra_body=IDS
    )
    assert again.choices[0].prompt_token_ids == answer.prompt_token_ids
    assert len(again.choices[0].logprobs.token_logprobs) == len(again.choices[0].token_ids) == 1


def test_verifiers_finds_token_ids_and_logprobs_at_vllms_route_for_token_ids(
    server: DemoServer, client: OpenAI, run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The body that verifiers 0.4.0 sends (renderers 0.1.12, renderers/client.py, `generate`), and what
    `_parse_completion_logprobs` there demands of the answer. The unmodified client runs in test_agent_examples.py."""
    prompt = tokenizer.encode("The old")
    params = {"temperature": 0.0, "max_tokens": 8, "stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": run.first, "token_ids": prompt, "sampling_params": params | {"routed_experts_prompt_start": 1}}
    answers = [
        httpx.post(
            f"{server.url}{prefix}/inference/v1/generate",
            json=body,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=60,
            trust_env=False,
        ).json()
        for prefix in ("", "/oai/api")
    ]
    choice = answers[0]["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(isinstance(entry["logprob"], float) and -9999.0 < entry["logprob"] <= 0 for entry in content)
    assert choice["finish_reason"] in ("stop", "length")
    assert answers[0]["model"] == run.first
    assert answers[1]["choices"] == answers[0]["choices"]
    same: Any = client.completions.create(
        model=run.first,
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        logprobs=0,
        extra_body=IDS | {"stop_token_ids": [2]},
    ).choices[0]
    assert choice["token_ids"] == same.token_ids
    assert [entry["logprob"] for entry in content] == pytest.approx(same.logprobs.token_logprobs, abs=1e-6)


# Refusals


# Clients that go; tests/e2e/test_sdk_retries.py has servers that die


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("chat/completions", {"messages": USER, "tools": [{"type": "function", "function": TOOL}]}),
        ("responses", {"input": "hi", "tools": [{"type": "function", **TOOL}]}),
        ("messages", {"messages": USER, "max_tokens": 9, "tools": [{"name": "add", "input_schema": {}}]}),
    ],
)
def test_tools_for_a_model_without_tools_are_refused_with_the_key_to_set(
    server: DemoServer, route: str, asked: dict[str, Any]
) -> None:
    """The tiny model's template has none."""
    headers = {"Authorization": f"Bearer {KEY}"}
    refused = httpx.post(
        f"{server.url}/v1/{route}", json={"model": "tiny", **asked}, headers=headers, timeout=60, trust_env=False
    )
    assert refused.status_code == 400
    assert "its chat template has none" in refused.text
    assert "generator.inference_engine.engine_init_kwargs" in refused.text
    assert "--" not in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_vllm(server: DemoServer, run: Run, stream: bool) -> None:
    asked = {"model": run.first, "prompt": "The old", "max_tokens": 3500, "ignore_eos": True, "n": 4, "stream": stream}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    until(lambda: in_vllm(server, RUNNING) == 0)
    completed = in_vllm(server, COMPLETED)
    with contextlib.closing(HTTPConnection(server.url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        until(lambda: in_vllm(server, RUNNING) == 4)
    until(lambda: in_vllm(server, RUNNING) == 0)
    assert in_vllm(server, COMPLETED) == completed
