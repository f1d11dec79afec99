"""Requests of Anthropic's Messages as chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import TranslatedRequest
from skyrl.chat.dialects.messages import to_chat, to_count
from skyrl.chat.dialects.messages.conversation import LEFT_OUT

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
ADDITION = {"type": "tool_addition"}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def translated(**fields: Any) -> TranslatedRequest:
    return to_chat(json.dumps({"model": "m", "max_tokens": 9, "messages": [USER]} | fields).encode())


def chat(**fields: Any) -> dict[str, Any]:
    return translated(**fields).chat


def messages(*given: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given), **fields)["messages"]


def user(*blocks: Any) -> list[dict[str, Any]]:
    return messages({"role": "user", "content": list(blocks)})


def assistant(*blocks: Any) -> dict[str, Any]:
    return messages({"role": "assistant", "content": list(blocks)}, USER)[0]


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given, "cache_control": {"type": "ephemeral"}}


def refused(**fields: Any) -> str | None:
    with pytest.raises(RequestError) as error:
        translated(**fields)
    assert error.value.status == 400
    return error.value.field


def test_the_fields_become_those_of_a_chat() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    assert chat(**given, stop_sequences=["END"], stream=True, max_tokens=32_000) == given | {
        "model": "m",
        "messages": [USER],
        "max_completion_tokens": 32_000,
        "stop": ["END"],
        "stream": True,
    }
    assert chat(temperature=None, stream=None) == chat()


def test_fields_of_anthropics_own_server_have_no_effect() -> None:
    hints = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "betas": ["interleaved-thinking"],
        "container": "c",
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "mcp_servers": [],
    }
    assert chat(**hints) == chat()
    assert translated(**hints).left_out == ()


# The system prompt


def test_the_system_prompt_is_the_first_message_and_its_blocks_are_joined() -> None:
    system = {"role": "system", "content": "You are\nbrief."}
    assert messages(USER, system="You are\nbrief.") == [system, USER]
    assert messages(USER, system=[text("You are"), text("brief.")]) == [system, USER]
    assert messages(USER, system=[]) == messages(USER, system="") == [USER]


def test_a_billing_header_which_changes_with_each_request_is_left_out_of_the_prompt() -> None:
    header = text("x-anthropic-billing-header: cc_version=2.1.197.4f2; cch=91c;")
    assert messages(USER, system=[header, text("You")]) == [{"role": "system", "content": "You"}, USER]
    assert messages(USER, system=[header]) == [USER]


def test_a_system_message_in_the_middle_stays_in_its_place() -> None:
    middle = {"role": "system", "content": "It is noon."}
    assert messages(USER, middle, USER) == [USER, middle, USER]
    assert messages(USER, {"role": "system", "content": [text("It is noon.")]}) == [USER, middle]


# Messages


def test_text_blocks_are_joined_and_images_become_parts() -> None:
    assert user(text("a"), text("b")) == [{"role": "user", "content": "a\nb"}]
    assert user(text("a"), PNG) == [{"role": "user", "content": [{"type": "text", "text": "a"}, PNG_PART]}]
    assert user() == [{"role": "user", "content": ""}]


def test_each_result_of_a_tool_is_a_message_and_the_order_stays() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "4"},
        {"type": "tool_result", "tool_use_id": "2", "content": [text("a"), text("b")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "3", "content": [text("see"), PNG]},
        {"type": "tool_result", "tool_use_id": "4"},
        {"type": "tool_result", "tool_use_id": "5", "is_error": True},
        {"type": "tool_result", "tool_use_id": "6", "content": [{"type": "tool_reference", "tool_name": "add"}]},
    ]
    contents = ["4", "a\nb", [{"type": "text", "text": "see"}, PNG_PART], "", "error", "add"]
    tools = [{"role": "tool", "tool_call_id": str(n), "content": c} for n, c in enumerate(contents, 1)]
    assert user(*results, text("go on")) == [*tools, {"role": "user", "content": "go on"}]
    assert user(text("before"), results[0]) == [{"role": "user", "content": "before"}, tools[0]]


def test_results_are_in_the_order_of_the_calls_that_they_name() -> None:
    calls = [{"type": "tool_use", "id": id, "name": "add", "input": {}} for id in ("a", "b", "c")]
    results = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in ("c", "?", "a", "b")]
    answered = [{"role": "assistant", "content": calls}, {"role": "user", "content": [*results, text("go on")]}]
    given = messages(USER, *answered, *answered)
    told = [message.get("tool_call_id") for message in given]
    assert told == [None, None, "a", "b", "c", "?", None, None, "a", "b", "c", "?", None]
    assert given[-1] == {"role": "user", "content": "go on"}


def test_thinking_text_and_calls_of_the_assistant_are_one_message() -> None:
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {"b": 1.0, "a": "x"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    assert assistant(thinking, text("a"), call, text("b")) == {
        "role": "assistant",
        "content": "ab",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1.0, "a": "x"}'}}
        ],
    }
    assert assistant() == {"role": "assistant", "content": ""}


def test_thinking_that_only_anthropic_can_read_is_left_out_and_said() -> None:
    blocks = [{"type": "redacted_thinking", "data": "x"}, text("a")]
    given = translated(messages=[USER, {"role": "assistant", "content": blocks}])
    assert given.chat["messages"][1] == {"role": "assistant", "content": "a"}
    assert len(given.left_out) == 1
    assert given.left_out[0].startswith("messages[1].content[0]: ")


def test_blocks_that_only_anthropics_server_understands_are_left_out_and_said() -> None:
    blocks = [*({"type": kind, "id": "x", "content": {"a": 1}, "input": {}} for kind in LEFT_OUT), text("a")]
    given = translated(messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert given.chat["messages"] == [USER, {"role": "assistant", "content": "a"}, USER]
    for number, (kind, sentence) in enumerate(zip(LEFT_OUT, given.left_out, strict=True)):
        assert sentence.startswith(f"messages[1].content[{number}]: a block of the type {kind!r} is left out: ")


def test_a_summary_in_place_of_a_conversation_is_text_of_the_assistant() -> None:
    assert assistant({"type": "compaction", "content": "So far: boats."}, text(" Go.")) == {
        "role": "assistant",
        "content": "So far: boats. Go.",
    }
    assert assistant({"type": "compaction", "content": None}) == {"role": "assistant", "content": ""}


def test_a_tool_that_a_block_adds_stands_behind_the_requests_own() -> None:
    added = ADDITION | {"tool": {"type": "tool_definition", "definition": TOOL | {"name": "sub"}}}
    named = ADDITION | {"tool": {"type": "tool_reference", "name": "add"}}
    for message in ({"role": "system", "content": [added, text("Use sub.")]}, {"role": "user", "content": [added]}):
        given = chat(messages=[USER, message, {"role": "user", "content": [named]}], tools=[TOOL])
        assert [tool["function"]["name"] for tool in given["tools"]] == ["add", "sub"]
        assert [each["content"] for each in given["messages"]][1:] in (["Use sub."], [])


def test_a_system_message_that_should_vanish_later_stays_and_is_said() -> None:
    system = {"role": "system", "content": "It is noon.", "clear_at": "next_user_message", "output_config": {}}
    given = translated(messages=[USER, system, USER])
    assert [each["content"] for each in given.chat["messages"]] == ["hi", "It is noon.", "hi"]
    assert [said.partition(":")[0] for said in given.left_out] == ["messages[1].clear_at"]


def test_an_assistants_message_at_the_end_is_continued() -> None:
    prefilled = chat(messages=[USER, {"role": "assistant", "content": "The"}])
    assert prefilled["continue_final_message"] is True
    assert prefilled["add_generation_prompt"] is False
    assert "continue_final_message" not in chat()


# Tools


def test_the_clients_tools_go_on_and_those_of_anthropics_server_are_left_out_and_said() -> None:
    strict = TOOL | {"name": "sub", "type": "custom", "strict": True, "cache_control": {}, "defer_loading": True}
    given = translated(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}, strict])
    function = ADD["function"] | {"name": "sub", "strict": True}
    assert given.chat["tools"] == [ADD, {"type": "function", "function": function}]
    assert given.left_out == ("tools[1]: a tool of the type 'web_search_20250305' is not served and left out",)
    assert "tools" not in chat(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    given = translated(mcp_servers=[{"url": "http://x"}])
    assert given.left_out == ("mcp_servers: this server connects to no MCP server",)


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
    ],
)
def test_the_choice_of_a_tool(choice: Any, fields: dict[str, Any]) -> None:
    assert chat(tools=[TOOL], tool_choice=choice) == chat(tools=[TOOL]) | fields


def test_a_choice_without_tools_has_no_effect_unless_it_asks_for_a_call() -> None:
    assert chat(tool_choice={"type": "auto"}) == chat()
    assert refused(tool_choice={"type": "any"}) == "tool_choice"
    assert refused(tools=[TOOL], tool_choice={"type": "tool", "name": "sub"}) == "tool_choice.name"


# Thinking and the answer's shape


def test_thinking_that_is_disabled_is_said_to_the_template() -> None:
    assert chat(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat(thinking={"type": "enabled", "budget_tokens": 1024}) == chat()
    assert chat(output_config={"effort": "high"})["reasoning_effort"] == "high"


def test_a_schema_of_the_answer_becomes_a_response_format() -> None:
    schema = {"type": "object", "properties": {}}
    shape = chat(output_config={"format": {"type": "json_schema", "schema": schema}})["response_format"]
    assert shape == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# Counting


def test_the_prompt_that_is_counted_is_the_one_that_is_asked() -> None:
    given = {"model": "m", "messages": [USER], "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    asked = chat(**given)
    assert to_count(json.dumps(given).encode()) == {
        name: asked[name] for name in ("model", "messages", "tools", "chat_template_kwargs")
    }


# Refusals


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"metadata": "me"}, "metadata"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "most"}}, "tool_choice.type"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


@pytest.mark.parametrize(
    ("role", "block", "part"),
    [
        ("user", {"type": "document", "source": {"type": "text", "data": "x"}}, "type"),
        ("user", {"type": "video"}, "type"),
        ("user", {"type": "tool_use", "id": "1", "name": "add", "input": {}}, "type"),
        ("user", {"type": "text"}, "text"),
        ("user", {"type": "image", "source": {"type": "url", "url": "http://x"}}, "source"),
        ("user", {"type": "image"}, "source"),
        ("user", {"type": "tool_result", "content": "x"}, "tool_use_id"),
        ("user", {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "audio"}]}, "content[0].type"),
        ("assistant", PNG, "type"),
        ("assistant", {"type": "of_tomorrow"}, "type"),
        ("user", {"type": "container_upload", "file_id": "f"}, "type"),
        ("user", {"type": "tool_result", "tool_use_id": "1", "content": {"a": 1}}, "content"),
        (
            "system",
            ADDITION | {"tool": {"type": "tool_definition", "definition": {"name": "x"}}},
            "tool.definition.input_schema",
        ),
        ("assistant", {"type": "tool_use", "id": "1", "name": "add", "input": [1]}, "input"),
        ("assistant", {"type": "thinking"}, "thinking"),
        ("system", PNG, "type"),
    ],
)
def test_a_block_that_cannot_be_served_is_refused_by_its_place(role: str, block: Any, part: str) -> None:
    assert refused(messages=[USER, {"role": role, "content": [block]}]) == f"messages[1].content[0].{part}"


def test_what_is_no_json_is_refused() -> None:
    for body in (b"", b"[]", b'{"model"', b'{"a":' * 5000):
        with pytest.raises(RequestError):
            to_chat(body)
