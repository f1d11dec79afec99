"""The fields and bounds of OpenAI requests: each field is honoured, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.weights import BaseWeights
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.answer_shape import MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, TOKEN_BYTES
from skyrl.chat.openai.errors import OpenAIError
from skyrl.chat.openai.exchanges import Sending, WholeAnswer
from skyrl.chat.openai.fields import ECHOED, REFUSED, WITHOUT_EFFECT, ChatFields, CompletionFields
from skyrl.chat.openai.generation import DEFAULT_MAX_TOKENS, Generation, chat, completion
from skyrl.chat.openai.models import Target
from skyrl.http.client import HttpClient
from skyrl.sampling.exchanges import MAX_ANSWER_BYTES
from skyrl.sampling.job import (
    MAX_ECHOED,
    MAX_NUM_SAMPLES,
    MAX_PROMPT_CELLS,
    MAX_SAMPLED,
    MAX_SEED,
    MAX_STOP_STRINGS,
)

LIMITS = ContextLimits(vocab_size=1000, max_context=4096)
UNKNOWN = ContextLimits()
PROMPT = {"model": "m", "prompt": [5, 6, 7]}
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def complete(limits: ContextLimits = LIMITS, /, **changes: Any) -> Generation:
    return completion(json.dumps(PROMPT | changes).encode(), limits)


def converse(limits: ContextLimits = LIMITS, /, **changes: Any) -> Generation:
    return chat(json.dumps(MESSAGES | changes).encode(), limits)


def sent(request: Generation, priority: int | None = None) -> dict[str, Any]:
    return json.loads(request.body("run@3", priority))


def refused(call: Any) -> str | None:
    with pytest.raises(RequestError) as error:
        call()
    assert error.value.status == 400
    return error.value.field


# Which fields go on


def test_allowed_fields_go_on_as_they_are_and_null_is_the_default() -> None:
    given = {"temperature": 0.5, "logit_bias": {"7": -1.5}, "response_format": {"type": "json_object"}, "top_k": -1}
    body = sent(complete(**given, stop=None, logprobs=None))
    assert body == PROMPT | given | {"model": "run@3", "stream": False}


def test_a_stream_asks_for_usage_in_every_event_whatever_the_caller_asked_for() -> None:
    for asked in (None, {"include_usage": False}, {"include_usage": True, "include_obfuscation": True}):
        request = complete(stream=True, stream_options=asked)
        assert sent(request, 4) == PROMPT | {
            "model": "run@3",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "priority": 4,
        }
        assert request.include_usage is bool((asked or {}).get("include_usage"))
        assert not request.continuous_usage


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_fields_about_the_caller_are_accepted_and_not_sent(name: str) -> None:
    assert name not in sent(complete(**{name: "x"}))
    assert name not in sent(converse(**{name: {"a": "b"}}))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_named_unless_their_value_changes_nothing(name: str) -> None:
    for ask in (complete, converse):
        assert refused(lambda ask=ask: ask(**{name: ["anything"]})) == name
        for harmless in (None, *REFUSED[name][0]):
            assert name not in sent(ask(**{name: harmless}))


def test_false_is_not_zero_where_a_refused_field_may_be_zero() -> None:
    assert refused(lambda: complete(priority=False)) == "priority"
    assert refused(lambda: complete(best_of=True)) == "best_of"


@pytest.mark.parametrize("name", ["frequenzy_penalty", "messages", "max_completion_tokens", "weights"])
def test_an_unknown_field_is_named(name: str) -> None:
    assert refused(lambda: complete(**{name: 1})) == name


def test_refused_fields_and_allowed_fields_are_disjoint() -> None:
    allowed = {*CompletionFields.__struct_fields__, *ChatFields.__struct_fields__}
    assert not allowed & REFUSED.keys()
    assert not allowed & WITHOUT_EFFECT


def test_a_wrong_type_is_named() -> None:
    assert refused(lambda: complete(max_tokens="many")) == "max_tokens"
    assert refused(lambda: complete(stream_options={"include_usage": 7}, stream=True)) == "stream_options.include_usage"
    assert refused(lambda: complete(stream_options={"x": 7}, stream=True)) == "stream_options"
    assert refused(lambda: complete(stream_options={})) == "stream_options"
    assert refused(lambda: complete(model=7)) == "model"
    assert refused(lambda: completion(b'{"model": "x"}', LIMITS)) == "prompt"
    assert refused(lambda: complete(top_k=2**31)) == "top_k"
    assert refused(lambda: converse(tools=[{"type": "function", "function": {"name": 7}}])) == "tools[0].function.name"
    assert refused(lambda: converse(tool_choice="f")) == "tool_choice"
    assert refused(lambda: converse(reasoning_effort="huge")) == "reasoning_effort"
    assert refused(lambda: complete(structured_outputs={"choice": [1]})) == "structured_outputs.choice[0]"
    assert refused(lambda: complete(structured_outputs={"_backend": "x"})) == "structured_outputs"
    assert refused(lambda: complete(response_format={"type": "structural_tag"})) == "response_format.type"


FUNCTION = {"name": "f", "parameters": {"type": "object", "not": {}}}
TAG = {"format": {"type": "json_schema", "json_schema": {"not": {}}}}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        ),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema.not",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
        ),
        ("structured_outputs.json.not", {"structured_outputs": {"json": {"not": {}}}}),
        ("structured_outputs.json.not", {"structured_outputs": {"json": '{"not": {}}'}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "7"}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "[" * 10_000 + "]" * 10_000}}),
        ("structured_outputs.json", {"structured_outputs": {"json": {"description": "x" * MAX_SCHEMA_BYTES}}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": ["ä" * 2**10] * 33}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{"}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "[" * 99 + "]" * 99}}),
        (
            "structured_outputs.structural_tag.json_schema.not",
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        ),
        ("structured_outputs", {"structured_outputs": {"disable_any_whitespace": True}}),
    ],
)
def test_a_shape_of_the_answer_that_cannot_be_had_is_named(field: str, changes: dict[str, Any]) -> None:
    body = json.dumps(PROMPT | changes).encode()
    assert refused(lambda: completion(body, LIMITS, grammars=True)) == field


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("regex", {"regex": "a"}),
        ("grammar", {"grammar": 'root ::= "a"'}),
        ("structural_tag", {"structural_tag": '{"format": {"type": "any_text"}}'}),
        ("json.pattern", {"json": {"type": "string", "pattern": "a"}}),
        ("json.items.patternProperties", {"json": {"items": {"type": "object", "patternProperties": {}}}}),
    ],
)
def test_regular_expressions_and_grammars_need_the_operators_consent(field: str, shape: dict[str, Any]) -> None:
    """`.?` sixteen times costs vLLM a second of every step with a vocabulary of 50,000."""
    changes = {"structured_outputs": shape}
    assert refused(lambda: complete(**changes)) == f"structured_outputs.{field}"
    assert sent(completion(json.dumps(PROMPT | changes).encode(), LIMITS, grammars=True))["structured_outputs"] == shape


def test_only_a_field_that_holds_the_answer_to_a_shape_can_be_at_fault() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert complete(structured_outputs={"choice": ["a"]}).shape == "structured_outputs"
    assert complete(response_format={"type": "json_object"}).shape == "response_format"
    assert converse(tools=tools, tool_choice="required").shape == "tools"
    assert converse(tools=tools).shape is complete(response_format={"type": "text"}).shape is complete().shape is None


def test_parameters_of_tools_are_checked_where_a_call_must_follow_them() -> None:
    tools, named = [{"type": "function", "function": FUNCTION}], {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        assert (
            refused(lambda choice=choice: converse(tools=tools, tool_choice=choice))
            == "tools[0].function.parameters.not"
        )
    strict = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    assert refused(lambda: converse(tools=strict)) == "tools[0].function.parameters.not"
    converse(tools=tools)
    converse(tools=strict, tool_choice="none")


def test_only_tools_that_make_a_grammar_are_bounded() -> None:
    long = {"name": "f", "description": "x" * MAX_SCHEMA_BYTES}
    tools = [{"type": "function", "function": long}]
    converse(tools=tools)
    assert refused(lambda: converse(tools=tools, tool_choice="required")) == "tools"
    strict = [{"type": "function", "function": long | {"strict": True}}]
    assert refused(lambda: converse(tools=strict)) == "tools"


# Prompts and messages


@pytest.mark.parametrize("prompt", ["text", ["one", "two"], [1, 2], [[1, 2], [3]]])
def test_prompts_are_texts_or_ids_or_lists_of_either(prompt: Any) -> None:
    assert sent(complete(prompt=prompt))["prompt"] == prompt


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, "x"], ["x", [1]], [[1], 2], [1000], [-1], [[2**40]], [[1]] * 1025]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refused(lambda: complete(prompt=prompt)) == "prompt"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://x"}}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}, "content[1].type"),
        ({"role": "user", "content": [{"image_url": "http://x"}]}, "content[0].type"),
        ({"role": "user", "content": ["text"]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "image_url": "x"}]}, "content[0].image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": 7}, "content"),
        ({"role": "user", "content": "x", "video": "http://x"}, "video"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": "x", "name": 7}, "name"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls"),
    ],
)
def test_a_message_with_more_than_text_and_pictures_is_refused(message: dict[str, Any], field: str) -> None:
    assert refused(lambda: converse(messages=[{"role": "user", "content": "x"}, message])) == f"messages[1].{field}"


def test_messages_go_on_without_the_empty_keys_of_a_repeated_answer() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    kept = {"role": "assistant", "content": None, "tool_calls": calls}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    body = sent(converse(messages=[kept | {"audio": None, "annotations": [], "refusal": None}, parts]))
    assert body["messages"] == [kept, parts]
    assert refused(lambda: converse(messages=[])) == "messages"


@pytest.mark.parametrize("key", sorted(ECHOED))
def test_what_clients_add_to_an_answer_or_say_to_other_servers_is_dropped(key: str) -> None:
    echo = {key: {"type": "ephemeral"}}
    function = {"name": "f", "arguments": "{}"}
    called = {"id": "1", "type": "function", "function": function | echo} | echo
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 1.0}} | echo} | echo
    said = {"role": "user", "content": [{"type": "text", "text": "a"} | echo]} | echo
    body = sent(converse(messages=[said, {"role": "assistant", "tool_calls": [called]} | echo], tools=[tool]))
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
    ]
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 1.0}}}]
    assert key not in ChatFields.__struct_fields__


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": "a", "prefix": True}, "messages[0].prefix"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "weight": 0}]}, "messages[0].content[0].weight"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_what_could_change_the_answer_is_still_refused_by_its_name(message: dict[str, Any], field: str) -> None:
    assert str(refused(lambda: converse(messages=[message]))).startswith(field)


def test_the_size_of_a_chat_counts_the_tokens_of_pictures_and_not_their_bytes() -> None:
    def asking(data: str, limits: ContextLimits = UNKNOWN, **changes: Any) -> Generation:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return converse(limits, messages=[{"role": "user", "content": [part]}], **changes)

    small, large = asking("AAAA"), asking("AAAA" * 1000)
    assert small.size == large.size
    (picture,) = large.pictures
    assert (picture.name, picture.format) == ("messages[0].content[0].image_url", "png")
    counted = large.with_pictures(100).size
    assert (counted.most_prompt, counted.likely_prompt) == (
        large.size.most_prompt + 100,
        large.size.likely_prompt + 100,
    )
    assert refused(lambda: asking("AAAA", n=10).with_pictures(MAX_ECHOED // 10)) == "n"
    assert refused(lambda: asking("AAAA", prompt_logprobs=1).with_pictures(MAX_PROMPT_CELLS // 2)) == "prompt"


def test_the_models_own_template_cannot_be_replaced() -> None:
    assert sent(converse(chat_template_kwargs={"enable_thinking": False}))["chat_template_kwargs"]
    assert (
        refused(lambda: converse(chat_template_kwargs={"chat_template": "x"})) == "chat_template_kwargs.chat_template"
    )


# Bounds


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": MAX_NUM_SAMPLES + 1}, "n"),
        ({"n": 4096, "max_tokens": 4000, "logprobs": 1}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 65}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 65}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprob_token_ids": [*range(65)]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1000]}, "logprob_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"prompt": [1] * (MAX_PROMPT_CELLS // 65 + 1), "prompt_logprobs": 64}, "prompt"),
        ({"prompt": [1] * (MAX_PROMPT_CELLS // 65 + 1), "logprobs": 64, "echo": True}, "prompt"),
        ({"prompt": [1] * 5000, "n": 4096, "max_tokens": 1}, "n"),
    ],
)
def test_a_request_above_a_bound_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    assert refused(lambda: complete(**changes)) == field


def test_max_tokens_above_the_context_is_cut_to_it_and_bounded_where_the_context_is_unknown() -> None:
    """vLLM refuses a larger number, and cuts a smaller one to what fits after the prompt."""
    for request in (complete(max_tokens=10**9), converse(max_tokens=5000), converse(max_completion_tokens=5000)):
        assert request.size.max_tokens == 4096
        assert {value for name, value in sent(request).items() if name.startswith("max_")} == {4096}
    assert sent(complete(max_tokens=4096))["max_tokens"] == 4096
    assert "max_tokens" not in sent(converse()), "vLLM fills the context"
    assert refused(lambda: complete(UNKNOWN, max_tokens=MAX_SAMPLED + 1)) == "max_tokens"
    for name in ("max_tokens", "max_completion_tokens"):
        assert refused(lambda name=name: converse(UNKNOWN, **{name: MAX_SAMPLED + 1})) == name


def test_a_prompt_of_tokens_must_leave_room_for_one() -> None:
    with pytest.raises(OpenAIError) as full:
        complete(prompt=[[5], [5] * 4096], max_tokens=1)
    assert (full.value.field, full.value.code) == ("prompt", "context_length_exceeded")
    assert (
        "maximum context length is 4096 tokens. However, your prompt contains 4096 input tokens" in full.value.message
    )
    complete(prompt=[5] * 4095, max_tokens=5)
    complete(prompt=[5] * 5000, max_tokens=5, truncate_prompt_tokens=-1)
    complete(UNKNOWN, prompt=[5] * 5000)


def test_the_key_that_bounds_the_context_is_named_where_the_model_takes_more() -> None:
    for model_context, named in ((32768, True), (4096, False), (None, False)):
        limits = ContextLimits(1000, 4096, model_context=model_context)
        with pytest.raises(OpenAIError) as full:
            complete(limits, prompt=[5] * 4096)
        assert ("generator.inference_engine.max_model_len" in full.value.message) is named


def test_the_bounds_hold_over_all_prompts_and_with_logprobs() -> None:
    complete(prompt=["x"] * 1024, n=16, max_tokens=1024)
    assert refused(lambda: complete(prompt=["x"] * 1024, n=16, max_tokens=1025)) == "n"
    complete(n=4096, max_tokens=63, logprobs=64)
    assert refused(lambda: complete(n=4096, max_tokens=64, logprobs=64)) == "n"
    assert refused(lambda: converse(top_logprobs=65, logprobs=True)) == "top_logprobs"


def test_seeds_leave_room_for_one_seed_per_choice() -> None:
    assert sent(complete(seed=7))["seed"] == 7
    assert sent(complete(seed=-1))["seed"] == MAX_SEED - 1
    assert sent(complete(seed=2**64 - 1))["seed"] < MAX_SEED


def test_the_size_of_a_request() -> None:
    size = complete(prompt=[[1, 2], [3]], n=3, max_tokens=10).size
    assert (size.sequences, size.most_prompt, size.likely_prompt, size.most_tokens) == (6, 3, 3, 63)
    assert complete().size.max_tokens == DEFAULT_MAX_TOKENS
    text = complete(prompt="ä" * 100).size
    assert (text.most_prompt, text.likely_prompt) == (200, 25)
    assert complete(prompt="x" * 9000).size.most_prompt == 4096
    assert complete(UNKNOWN, prompt="x" * 9000).size.most_prompt == 9000


def test_a_chat_without_a_number_may_fill_the_context() -> None:
    assert converse().size.max_tokens == 4096
    assert converse(max_tokens=5, max_completion_tokens=3).size.max_tokens == 3
    unknown = converse(UNKNOWN).size
    assert (unknown.max_tokens, unknown.answer_bytes) == (None, MAX_ANSWER_BYTES)
    assert unknown.most_tokens == unknown.most_prompt > 0


def test_the_largest_answer_grows_with_every_part() -> None:
    small = complete(max_tokens=1).size.answer_bytes
    assert complete(max_tokens=11).size.answer_bytes == small + 10 * TOKEN_BYTES
    for changes in ({"n": 2}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"prompt": [1] * 9}):
        assert complete(max_tokens=1, **changes).size.answer_bytes > small, changes


@pytest.mark.parametrize(
    ("changes", "scores"),
    [({}, False), ({"logprobs": 1}, False), ({"echo": True}, False), ({"echo": True, "logprobs": 0}, True),
     ({"prompt_logprobs": 0}, True)],
)  # fmt: skip
def test_logprobs_of_the_prompt_are_known(changes: dict[str, Any], scores: bool) -> None:
    assert complete(**changes).scores_prompt is scores


def test_requests_of_one_tenant_for_one_model_share_a_routing_key() -> None:
    """Behind skyrl's router, requests with the same key find their common prefix in one replica's cache."""

    def exchange(tenant: str, model: str, request_id: str) -> WholeAnswer:
        target = Target("name", model, "base", BaseWeights())
        return WholeAnswer(Sending(complete(), target, None, tenant, request_id), HttpClient())

    one = exchange("a", "run@1", "1")
    assert one.shared_key == exchange("a", "run@1", "2").shared_key
    assert one.key != exchange("a", "run@1", "2").key
    assert len({one.shared_key, exchange("b", "run@1", "1").shared_key, exchange("a", "run@2", "1").shared_key}) == 3
