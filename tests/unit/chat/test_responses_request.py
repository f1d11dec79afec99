"""Requests of OpenAI's Responses as chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import TranslatedRequest
from skyrl.chat.dialects.responses import previous_response_id, to_chat
from skyrl.chat.dialects.responses.fields import LEFT_OUT

USER = {"role": "user", "content": "hi"}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": False}
ADD_IN_CHAT = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}
PNG = "data:image/png;base64,aGk="
PNG_PART = {"type": "image_url", "image_url": {"url": PNG}}


def translated(previous: list[dict[str, Any]] | None = None, **fields: Any) -> TranslatedRequest:
    return to_chat(json.dumps({"model": "m", "input": "hi"} | fields).encode(), previous, "resp_1")


def chat(previous: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    return translated(previous, **fields).chat


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat(input=list(items), **fields)["messages"]


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(parts)}


def text(given: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": given}


def call(name: str, arguments: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "1", "name": name, "arguments": arguments} | fields


def call_in_chat(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def functions(chat: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in chat["tools"]]


def refused(**fields: Any) -> str | None:
    with pytest.raises(RequestError) as error:
        translated(**fields)
    assert error.value.status == 400
    return error.value.field


def test_the_fields_become_those_of_a_chat() -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9}
    assert chat(**given, max_output_tokens=32_000, reasoning={"effort": "low", "summary": "auto"}, stream=True) == {
        "model": "m",
        "messages": [USER],
        "max_completion_tokens": 32_000,
        "reasoning_effort": "low",
        "stream": True,
        **given,
    }
    assert chat(temperature=None, stream=None, reasoning=None, text=None) == chat()


def test_fields_of_openais_own_server_have_no_effect() -> None:
    hints = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn": "1"},
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "u",
        "truncation": "disabled",
        "background": False,
        "top_logprobs": 2,
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "stream_options": {"include_obfuscation": False},
    }
    assert chat(**hints) == chat()
    assert translated(**hints).left_out == ()


def test_what_is_asked_and_cannot_be_given_is_said() -> None:
    assert translated(include=["message.output_text.logprobs"]).left_out == (
        "include: answers of this dialect have no logprobs",
    )
    assert len(translated(truncation="auto").left_out) == 1


def test_a_schema_of_the_answer_becomes_a_response_format() -> None:
    shape = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": shape})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert refused(text={"format": {"type": "json_schema", "name": "n"}}) == "text.format.schema"


# Items


def test_messages_of_all_roles_and_instructions() -> None:
    brief = said("developer", text("Be brief."))
    given = [brief, said("system", text("Be kind.")), said("user", text("a"), text("b")), USER]
    assert messages(*given, instructions="You are an agent.") == [
        {"role": "system", "content": "You are an agent."},
        {"role": "developer", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        USER,
    ]


def test_images_become_parts() -> None:
    image = {"type": "input_image", "image_url": PNG, "detail": "auto"}
    assert messages(said("user", text("see"), image)) == [
        {"role": "user", "content": [{"type": "text", "text": "see"}, PNG_PART]}
    ]
    output = {"type": "function_call_output", "call_id": "1", "output": [text("see"), image]}
    assert messages(output)[0]["content"] == [{"type": "text", "text": "see"}, PNG_PART]


def test_the_items_of_one_answer_are_one_message() -> None:
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("hm", "reasoning_text")]},
        said("assistant", text("o", "output_text"), text("k", "output_text")),
        call("add", '{"a": 1}'),
        call("sub", "{}"),
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        call("add", "{}"),
        {"type": "function_call_output", "call_id": "1", "output": ""},
    ]
    assert messages(USER, *items) == [
        USER,
        {
            "role": "assistant",
            "content": "ok",
            "reasoning": "hm",
            "tool_calls": [call_in_chat("add", '{"a": 1}'), call_in_chat("sub", "{}")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "", "tool_calls": [call_in_chat("add", "{}")]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]


def test_outputs_are_in_the_order_of_the_calls_that_they_name_also_in_a_continued_response() -> None:
    calls = [call("add", "{}", call_id=id) for id in ("a", "b")]
    outputs = [{"type": "function_call_output", "call_id": id, "output": id} for id in ("b", "a")]
    assert [message["content"] for message in messages(*calls, *outputs)] == ["", "a", "b"]
    assert [message["content"] for message in chat(messages(*calls), input=outputs)["messages"]] == ["", "a", "b"]


def test_reasoning_is_read_from_its_text_from_our_encrypted_content_or_from_its_summary() -> None:
    ours = {"type": "reasoning", "id": "r", "summary": [text("s", "summary_text")], "encrypted_content": "skyrl:hm"}
    assert messages(ours)[0]["reasoning"] == "hm"
    assert messages(ours | {"content": [text("other", "reasoning_text")]})[0]["reasoning"] == "other"
    foreign = translated(input=[ours | {"encrypted_content": "gAAAA"}])
    assert foreign.chat["messages"][0]["reasoning"] == "s"
    assert foreign.left_out == ("input[0]: reasoning that only another server can read is left out",)


def test_a_response_is_continued_and_instructions_take_the_place_of_the_earlier_ones() -> None:
    earlier = [{"role": "system", "content": "Old."}, USER, {"role": "assistant", "content": "ok"}]
    assert chat(earlier, input="go on")["messages"] == [*earlier, {"role": "user", "content": "go on"}]
    assert chat(earlier, instructions="New.")["messages"] == [{"role": "system", "content": "New."}, *earlier[1:], USER]
    assert chat(earlier[1:], instructions="New.")["messages"][:2] == [{"role": "system", "content": "New."}, USER]
    brief = said("developer", text("Be brief."))
    answered = [*messages(brief, USER), {"role": "assistant", "content": "ok"}]
    assert chat(answered, instructions="New.")["messages"][1] == {"role": "developer", "content": "Be brief."}
    assert previous_response_id(b'{"model": "m", "previous_response_id": "resp_0"}') == "resp_0"
    assert previous_response_id(b'{"model": "m"}') is None


# Tools


def test_functions_go_on_and_tools_of_openais_server_are_left_out_and_said() -> None:
    given = translated(tools=[ADD, {"type": "web_search", "external_web_access": False}, READ | {"strict": True}])
    assert given.chat["tools"] == [
        ADD_IN_CHAT,
        {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}, "strict": True}},
    ]
    assert given.left_out == ("tools[1]: a tool of the type 'web_search' is not served and left out",)
    assert "tools" not in chat(tools=[{"type": "web_search"}], parallel_tool_calls=True)


def test_the_tools_of_a_namespace_have_their_own_names_unless_two_have_the_same() -> None:
    space = {"type": "namespace", "name": "mcp__fs__", "tools": [READ, {"type": "web_search"}]}
    given = translated(tools=[ADD, space])
    assert functions(given.chat) == ["add", "read"]
    assert given.left_out == ("tools[1].tools[1]: a tool of the type 'web_search' is not served and left out",)
    both = [space, READ, {"type": "namespace", "name": "db", "tools": [READ]}]
    assert functions(chat(tools=both)) == ["mcp__fs__read", "read", "db__read"]
    calls = messages(call("read", "{}", namespace="db"), call("read", "{}"), tools=both)[0]["tool_calls"]
    assert [each["function"]["name"] for each in calls] == ["db__read", "read"]


def test_a_custom_tool_is_a_function_of_a_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    tool = chat(tools=[{"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}])["tools"][0]
    assert tool["function"]["name"] == "patch"
    assert tool["function"]["description"].startswith("Edits.")
    assert "start: x" in tool["function"]["description"]
    assert tool["function"]["parameters"]["required"] == ["input"]
    items = [
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a"b'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
    ]
    assert messages(*items) == [
        {"role": "assistant", "content": "", "tool_calls": [call_in_chat("patch", '{"input":"a\\"b"}')]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_the_choice_of_a_tool_by_a_word(choice: str) -> None:
    assert chat(tools=[ADD], tool_choice=choice)["tool_choice"] == choice


def test_the_choice_of_a_tool_by_its_name() -> None:
    named = {"tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False}
    given = {"tools": [ADD], "parallel_tool_calls": False}
    assert chat(**given, tool_choice={"type": "function", "name": "add"}) == chat(**given) | named
    assert chat(tool_choice="auto") == chat()
    assert refused(tool_choice="required") == "tool_choice"
    assert refused(tools=[ADD], tool_choice={"type": "function", "name": "sub"}) == "tool_choice.name"
    assert refused(tools=[ADD], tool_choice={"type": "web_search"}) == "tool_choice.type"


# Items of today's agents


def test_items_that_only_openais_server_understands_are_left_out_and_said() -> None:
    given = translated(input=[USER, *({"type": kind, "id": "x"} for kind in LEFT_OUT), said("assistant", text("ok"))])
    assert given.chat["messages"] == [USER, {"role": "assistant", "content": "ok"}]
    assert [
        f"input[{number}]: an item of the type {kind!r}" in said
        for number, (kind, said) in enumerate(zip(LEFT_OUT, given.left_out, strict=True), 1)
    ] == [True] * len(LEFT_OUT)


def test_tools_that_an_item_adds_stand_behind_the_requests_own() -> None:
    newer = ADD | {"description": "Adds two numbers."}
    more = {"type": "additional_tools", "role": "developer", "tools": [READ, newer, {"type": "web_search"}]}
    given = translated(tools=[ADD], input=[USER, more], tool_choice={"type": "function", "name": "read"})
    assert functions(given.chat) == ["add", "read"]
    assert given.chat["tools"][0]["function"]["description"] == "Adds two numbers."
    assert given.chat["messages"] == [USER]
    assert given.left_out == ("input[1].tools[2]: a tool of the type 'web_search' is not served and left out",)


def test_what_another_agent_says_is_a_users_message() -> None:
    parts = [text("Done: 3 files."), {"type": "encrypted_content", "encrypted_content": "gAAAA"}]
    item = {"type": "agent_message", "author": "/lead/tests", "recipient": "/lead", "content": parts}
    given = translated(input=[USER, item])
    told = {"role": "user", "content": "Message from /lead/tests to /lead:\nDone: 3 files."}
    assert given.chat["messages"] == [USER, told]
    assert given.left_out == ("input[1].content[1]: only another server can read it, so it is left out",)


@pytest.mark.parametrize(
    ("call", "result", "name", "arguments", "content"),
    [
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "1", "output": "a.txt"},
            "local_shell",
            '{"type":"exec","command":["ls"]}',
            "a.txt",
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a.txt", "stderr": ""}]},
            "shell",
            '{"commands":["ls"]}',
            '[{"stdout":"a.txt","stderr":""}]',
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.txt"}},
            {"type": "apply_patch_call_output", "call_id": "1", "status": "completed"},
            "apply_patch",
            '{"type":"delete_file","path":"a.txt"}',
            "completed",
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.txt"}},
            {"type": "apply_patch_call_output", "call_id": "1", "status": "failed", "output": None},
            "apply_patch",
            '{"type":"delete_file","path":"a.txt"}',
            "failed",
        ),
        (
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "files"}},
            {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [READ]},
            "tool_search",
            '{"query":"files"}',
            '[{"type":"function","name":"read","parameters":{"type":"object"}}]',
        ),
    ],
)
def test_calls_that_a_client_runs_itself_are_calls_of_functions(
    call: dict[str, Any], result: dict[str, Any], name: str, arguments: str, content: str
) -> None:
    given = chat(input=[USER, call | {"call_id": "1"}, result])
    assert given["messages"] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call_in_chat(name, arguments)]},
        {"role": "tool", "tool_call_id": "1", "content": content},
    ]
    assert ("tools" in given) == (name == "tool_search"), "a tool that was found can be called"


def test_a_search_for_tools_that_openais_server_ran_adds_its_tools_alone() -> None:
    search = {"type": "tool_search_call", "execution": "server", "arguments": {"query": "files"}, "call_id": None}
    found = {"type": "tool_search_output", "execution": "server", "tools": [READ], "call_id": None}
    given = translated(input=[USER, search, found])
    assert (given.chat["messages"], functions(given.chat), len(given.left_out)) == ([USER], ["read"], 1)


def test_the_output_of_a_tool_that_the_model_has_not_called_is_the_users() -> None:
    output = {"type": "function_call_output", "name": "clock", "output": "noon"}
    assert messages(USER, output) == [USER, {"role": "user", "content": "Output of clock:\nnoon"}]


def test_an_item_changes_the_requests_settings() -> None:
    shape = {"format": {"type": "json_object"}}
    first = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    last = {"type": "configuration_update", "reasoning": {"effort": "high"}, "text": shape}
    given = chat(input=[USER, first, last], reasoning={"effort": "medium"})
    assert (given["reasoning_effort"], given["response_format"]) == ("high", {"type": "json_object"})
    huge = {"type": "configuration_update", "reasoning": {"effort": "huge"}}
    assert refused(input=[USER, huge], reasoning={"effort": "low"}) == "input[1].reasoning.effort"


# Refusals


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"model": 5}, "model"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": "me"}, "metadata"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": "most"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


@pytest.mark.parametrize(
    ("item", "part"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "type"),
        ({"type": "compaction_trigger"}, "type"),
        ({"type": "of_tomorrow"}, "type"),
        ({"type": "shell_call", "call_id": "1"}, "action"),
        ({"type": "shell_call", "call_id": "1", "action": [1]}, "action"),
        ({"type": "local_shell_call", "action": {}}, "call_id"),
        ({"type": "tool_search_output", "call_id": "1"}, "tools"),
        ({"type": "additional_tools", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"type": "additional_tools", "tools": [{"name": "add"}]}, "tools[0].type"),
        ({"type": "agent_message", "author": "a", "recipient": "b"}, "content"),
        ({"type": "function_call", "call_id": "1", "name": "add", "arguments": {}}, "arguments"),
        ({"type": "function_call_output", "call_id": "1", "output": [{"text": "x"}]}, "output[0].type"),
        ({"type": "message", "content": "hi"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "tool", "content": "hi"}, "role"),
        ({"type": "function_call", "call_id": "1", "name": "add"}, "arguments"),
        ({"type": "function_call", "name": "add", "arguments": "{}"}, "call_id"),
        ({"type": "function_call_output", "call_id": "1"}, "output"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}, "content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
    ],
)
def test_an_item_that_cannot_be_served_is_refused_by_its_place(item: Any, part: str) -> None:
    assert refused(input=[USER, item]) == f"input[1].{part}"
