"""What becomes of each field of a request to vLLM's routes that sample."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_sources import fields_of

from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.openai_request import (
    BATCH,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    OF_VLLM,
    REFUSED,
    RESPONSES,
    SERVED,
    WITHOUT_EFFECT,
    OpenaiRequest,
    read_openai,
)

IDS = [5, 6, 7]
BY_HALF = {"bad_words"}
"""Fields of vLLM that are refused, because it honours them by half."""
OF_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
REQUESTS = {
    COMPLETIONS: "vllm.entrypoints.openai.completion.protocol.CompletionRequest",
    CHAT: "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest",
    RESPONSES: "vllm.entrypoints.openai.responses.protocol.ResponsesRequest",
    MESSAGES: "vllm.entrypoints.anthropic.protocol.AnthropicMessagesRequest",
    GENERATE: "vllm.entrypoints.scale_out.token_in_token_out.protocol.GenerateRequest",
}


def read(path: str, **fields: Any) -> OpenaiRequest:
    return read_openai(path, json.dumps(fields).encode())


def sent(path: str, **fields: Any) -> dict[str, Any]:
    """What vLLM gets."""
    return json.loads(read(path, **fields).body)


def refusal(path: str, **fields: Any) -> str:
    with pytest.raises(BadRequest) as raised:
        read(path, **fields)
    return str(raised.value)


@pytest.mark.parametrize("path", [*REQUESTS, BATCH])
def test_the_fields_of_vllm_are_those_of_its_requests(path: str) -> None:
    """A new version of vLLM may have new ones: then they are looked at, and may pass."""
    if path == BATCH:
        batch = fields_of("vllm.entrypoints.openai.chat_completion.protocol.BatchChatCompletionRequest")
        assert OF_VLLM[BATCH] == (batch | OF_VLLM[CHAT]) - BY_HALF
    else:
        assert OF_VLLM[path] == fields_of(REQUESTS[path]) - BY_HALF


def test_each_field_is_one_of_four() -> None:
    sampling = OF_VLLM[COMPLETIONS] | OF_VLLM[CHAT]
    for one, other in ((SERVED, WITHOUT_EFFECT), (SERVED, REFUSED.keys()), (WITHOUT_EFFECT, REFUSED.keys())):
        assert not one & other
    assert not sampling & (SERVED | WITHOUT_EFFECT | REFUSED.keys())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, BATCH])
@pytest.mark.parametrize("name", [*sorted(REFUSED), "unheard_of"])
def test_a_field_that_would_be_ignored_is_refused_by_name(name: str, path: str) -> None:
    prompt = {"prompt": IDS} if path == COMPLETIONS else OF_CHAT
    if name not in OF_VLLM[path]:
        assert refusal(path, **prompt, **{name: ["x"]}).startswith(f"{name}: ")
    for nothing in (None, False, "", [], {}, *REFUSED.get(name, ((), ""))[0]):
        request = read(path, **prompt, **{name: nothing})
        assert (request.is_plain, request.body) == (True, json.dumps(prompt | {name: nothing}).encode())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, BATCH, RESPONSES, MESSAGES, GENERATE])
def test_what_has_no_effect_passes_as_it_came(path: str) -> None:
    body = b'{"model":"m",  ' + b",".join(b'"%s": 1.50' % one.encode() for one in sorted(WITHOUT_EFFECT)) + b"}"
    request = read_openai(path, body)
    assert (request.body, request.is_plain) == (body, True)


@pytest.mark.parametrize("path", [BATCH, RESPONSES, MESSAGES, GENERATE])
def test_other_routes_refuse_what_two_routes_serve(path: str) -> None:
    for name in SERVED - OF_VLLM[path]:
        assert refusal(path, **{name: ["x"]}).startswith(f"{name}: is not a field of {path}")
        assert read(path, **{name: None}).is_plain


@pytest.mark.parametrize(("path", "name"), [(RESPONSES, "client_metadata"), (MESSAGES, "context_management")])
def test_agents_fields_pass_at_their_own_routes(path: str, name: str) -> None:
    """vLLM serves agents there, whose newest versions send fields that change nothing."""
    assert read(path, model="m", thinking=None, **{name: {"a": 1}}).is_plain
    assert refusal(path, stop_regex="a").startswith("stop_regex: ")


def test_ids_are_the_prompt_of_a_completion() -> None:
    request = read(COMPLETIONS, input_ids=IDS, max_tokens=3, return_routed_experts=False)
    assert json.loads(request.body) == {"prompt": IDS, "max_tokens": 3}
    assert (request.is_plain, request.given_tokens) == (True, 3)
    assert refusal(COMPLETIONS, input_ids=IDS, prompt="a") == "input_ids: cannot be combined with prompt"
    for wrong in ([], [1.5], [-1], "abc", [[1]], 7):
        assert refusal(COMPLETIONS, input_ids=wrong).startswith("input_ids: ")


def test_ids_are_the_prompt_of_a_chat() -> None:
    request = read(CHAT, **OF_CHAT, input_ids=IDS, kv_transfer_params={"a": 1})
    ids = {"kv_transfer_params": {"a": 1, "prompt_token_ids": IDS}, "return_token_ids": True}
    assert json.loads(request.body) == OF_CHAT | ids
    assert (request.tokens, request.is_plain, request.keeps_ids) == (IDS, False, False)
    for fields, name in (
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "input_ids"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "input_ids"),
        ({"kv_transfer_params": 7}, "kv_transfer_params"),
    ):
        assert refusal(CHAT, **OF_CHAT | {"input_ids": IDS} | fields).startswith(f"{name}: ")
    parts = [{"role": "user", "content": ["hi", {"type": "text", "text": "a"}, {"text": "b"}]}]
    assert read(CHAT, messages=parts, input_ids=IDS).tokens == IDS


def test_meta_info_is_asked_for_with_what_it_needs() -> None:
    request = read(CHAT, **OF_CHAT, return_meta_info=True, logprobs=True, return_token_ids=False)
    assert json.loads(request.body) == OF_CHAT | {"logprobs": True, "return_token_ids": True}
    assert (request.meta_info, request.logprobs, request.keeps_ids) == (True, True, False)
    assert not read(COMPLETIONS, prompt="a", return_meta_info=True).logprobs
    assert read(COMPLETIONS, prompt="a", return_meta_info=True, logprobs=0).logprobs
    assert read(CHAT, **OF_CHAT, return_prompt_token_ids=True, return_token_ids=True).keeps_ids
    for fields, name in (
        ({"return_meta_info": True, "stream": True}, "return_meta_info"),
        ({"return_prompt_token_ids": True, "stream": True}, "return_prompt_token_ids"),
        ({"return_meta_info": True, "echo": True}, "echo"),
        ({"return_meta_info": True, "use_beam_search": True}, "use_beam_search"),
        ({"return_meta_info": True, "include_reasoning": False}, "include_reasoning"),
        ({"return_meta_info": "yes"}, "return_meta_info"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_routed_experts": True, "return_meta_info": True, "routed_experts_start_len": -1}, "routed_experts"),
    ):
        assert refusal(CHAT, **OF_CHAT | fields).startswith(name)
    experts = {"return_routed_experts": True, "return_meta_info": True, "routed_experts_start_len": 2}
    assert sent(CHAT, **OF_CHAT, **experts)["routed_experts_prompt_start"] == 2


def test_grammars_adapters_and_stops_become_vllms() -> None:
    for ours, theirs in (("regex", "regex"), ("ebnf", "grammar"), ("json_schema", "json")):
        assert sent(COMPLETIONS, prompt="a", **{ours: "x"})["structured_outputs"] == {theirs: "x"}
    assert (
        sent(COMPLETIONS, prompt="a", json_schema={"type": "object"})["structured_outputs"]["json"]["type"] == "object"
    )
    assert sent(CHAT, **OF_CHAT, model="base", lora_path="a-v1")["model"] == "a-v1"
    assert sent(CHAT, **OF_CHAT, no_stop_trim=True)["include_stop_str_in_output"] is True
    assert sent(CHAT, **OF_CHAT, extra_key="k")["cache_salt"] == "k"
    assert read(CHAT, **OF_CHAT, regex="x").is_plain
    for fields, name in (
        ({"regex": "a", "ebnf": "b"}, "regex"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"ebnf": "a", "structured_outputs": {"regex": "b"}}, "ebnf"),
        ({"ebnf": {"a": 1}}, "ebnf"),
        ({"lora_path": ["a"]}, "lora_path"),
        ({"lora_path": "\ud800"}, "lora_path"),
        ({"extra_key": "a", "cache_salt": "b"}, "extra_key"),
        ({"no_stop_trim": 1}, "no_stop_trim"),
    ):
        assert refusal(CHAT, **OF_CHAT | fields).startswith(f"{name}: ")


def test_invocations_are_what_they_look_like() -> None:
    assert refusal("/invocations", **OF_CHAT, foo=1).startswith("foo: ")
    assert json.loads(read("/invocations", **OF_CHAT, input_ids=IDS).body)["kv_transfer_params"]
    assert read("/invocations", prompt="a", return_meta_info=True).meta_info
    assert refusal("/invocations", prompt="a", messages=None, sampling_seed=1).startswith("sampling_seed: ")
    assert read("/invocations", input="a", foo=1).is_plain, "an embedding"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff", b'{"a":' * 50_000, b'{"foo": 1} x', b"null"])
def test_what_is_no_object_is_vllms_to_refuse(body: bytes) -> None:
    assert read_openai(CHAT, body).body == body


def test_json_that_vllm_reads_and_others_do_not_is_read_too() -> None:
    for body in (
        b'{"stop_regex": "a", "temperature": NaN}',
        b'{"stop_regex": "\\ud800"}',
        b'\xef\xbb\xbf{"stop_regex":1}',
    ):
        with pytest.raises(BadRequest, match="stop_regex"):
            read_openai(CHAT, body)
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}], "input_ids": [5]}'
    assert json.loads(read_openai(CHAT, surrogate).body)["messages"][0]["content"] == "\ud800"
    deep = b'{"foo": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert read_openai(CHAT, deep).body == deep


def test_the_page_names_what_is_served_and_what_is_ignored() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/sidecar.md").read_text()
    named = set(re.findall(r"`(\w+)`", page.partition("## Completions and chats")[2].partition("\n## ")[0]))
    assert named >= SERVED | WITHOUT_EFFECT
