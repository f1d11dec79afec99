"""Tools, thinking and shapes of answers in chat completions."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerBase

from .conftest import KEY

pytestmark = pytest.mark.vllm

ASKED: list[Any] = [{"role": "user", "content": "Who watches the river?"}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,  # else the arguments may be any JSON
        "description": "Look somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "enum": ["river", "boat"]}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def no_spaces(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """A bias against white space, which JSON may have without an end."""
    return {str(token): -100 for token in range(len(tokenizer)) if not str(tokenizer.decode([token])).strip()}


def ask(client: openai.OpenAI, **given: Any) -> Any:
    """A chat completion without thinking, unless `given` says otherwise."""
    fields = {"messages": ASKED, "max_tokens": 256, "temperature": 0.0, "extra_body": PLAIN} | given
    return client.chat.completions.create(model="tools", **fields)


def test_a_required_call_is_parsed(client: openai.OpenAI, no_spaces: dict[str, int]) -> None:
    (choice,) = ask(client, tools=[LOOK], tool_choice="required", logit_bias=no_spaces).choices
    assert choice.finish_reason == "tool_calls"
    (call, *_) = choice.message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["where"] in ("river", "boat")


def test_a_required_call_is_parsed_in_a_stream(client: openai.OpenAI, no_spaces: dict[str, int]) -> None:
    events = list(ask(client, tools=[LOOK], tool_choice="required", logit_bias=no_spaces, stream=True))
    pieces = [call.function for event in events for call in event.choices[0].delta.tool_calls or []]
    assert "".join(piece.name or "" for piece in pieces) == "look"
    assert json.loads("".join(piece.arguments or "" for piece in pieces))["where"] in ("river", "boat")


def test_tools_that_the_model_need_not_use_are_accepted(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tools=[LOOK]).choices
    assert choice.message.content
    assert not choice.message.tool_calls


def test_results_of_tools_go_on(client: openai.OpenAI) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"where": "river"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call-1", "content": "A boat."}
    with_result = ask(client, tools=[LOOK], messages=[*ASKED, said, result])
    without = ask(client, tools=[LOOK], messages=[*ASKED, said])
    assert with_result.usage.prompt_tokens > without.usage.prompt_tokens


def test_thinking_is_apart_from_the_text(client: openai.OpenAI) -> None:
    (thinking,) = ask(client, extra_body={}).choices
    assert thinking.message.reasoning
    assert not thinking.message.content  # the tiny model does not end thinking
    (plain,) = ask(client).choices
    assert plain.message.content
    assert not getattr(plain.message, "reasoning", None)


def test_a_second_call_is_made_unless_one_is_asked_for(client: openai.OpenAI, no_spaces: dict[str, int]) -> None:
    """Without its end token, 2, the model goes on with another call for as long as the grammar allows one."""

    def calls(**more: Any) -> int:
        asked: dict[str, Any] = {"tools": [LOOK], "tool_choice": "required", "logit_bias": no_spaces | {"2": -100}}
        events = list(ask(client, **asked, max_tokens=160, stream=True, **more))
        return sum(call.function.name == "look" for event in events for call in event.choices[0].delta.tool_calls or [])

    assert calls() == calls(parallel_tool_calls=True) == 2
    assert calls(parallel_tool_calls=False) == 1


def test_fields_about_thinking_have_an_effect(client: openai.OpenAI) -> None:
    def said(**given: Any) -> Any:
        return ask(client, max_tokens=20, **({"extra_body": {}} | given))

    assert said().choices[0].message.reasoning
    assert not said(extra_body={"include_reasoning": False}).choices[0].message.reasoning
    assert said(reasoning_effort="none").choices[0].message.content
    assert said(reasoning_effort="none").usage.prompt_tokens > said().usage.prompt_tokens
    thinks: Any = {"model": "tools", "prompt": "<think>", "max_tokens": 12, "temperature": 0.0}
    budget = {"thinking_token_budget": 3, "ignore_eos": True, "skip_special_tokens": False}
    text = client.completions.create(**thinks, extra_body=budget).choices[0].text
    assert "</think>" in text
    assert "</think>" not in client.completions.create(**thinks, extra_body={"ignore_eos": True}).choices[0].text


def test_a_chat_without_thinking_has_the_shape_that_is_asked_for(
    client: openai.OpenAI, no_spaces: dict[str, int]
) -> None:
    schema = {"name": "answer", "schema": LOOK["function"]["parameters"]}
    (choice,) = ask(
        client, response_format={"type": "json_schema", "json_schema": schema}, logit_bias=no_spaces
    ).choices
    assert json.loads(choice.message.content)["where"] in ("river", "boat")


def test_a_completion_has_the_shape_from_its_first_token_though_the_model_may_think(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tools",
        prompt="<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
        max_tokens=16,
        extra_body={"structured_outputs": {"choice": ["heron", "otter"]}},
    )
    assert answer.choices[0].text in ("heron", "otter")
