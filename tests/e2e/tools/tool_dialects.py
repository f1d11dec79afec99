"""Conversations with tools by the real clients of three dialects, each in its own words, whole or streamed.

The tool is strict and its model held to a call, so that the tiny model calls it. The clients ask for no thoughts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import anthropic
import openai

PLACES = ["north", "south"]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": PLACES}},
    "required": ["place"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "description": "See who is there.", "strict": True}
TASK: list[Any] = [{"role": "user", "content": "Who watches the river?"}]
ROOM, TEMPERATURE = 6000, 2.0
"""Tokens for a call, and how they are drawn. The grammar allows any space between the words of its JSON, which the tiny
model fills with thousands of tokens at temperature 1, and with about 200 at 2."""


@dataclass
class Call:
    id: str
    name: str
    arguments: dict[str, Any]


@dataclass
class Talk:
    """What was said, as the dialect sends it, and what the last answer was."""

    said: list[Any] = field(default_factory=lambda: list(TASK))
    calls: list[Call] = field(default_factory=list)
    reason: str | None = None
    prompt_tokens: int = 0


class Dialect(Protocol):
    """`one` allows one call at a time. `ask` adds the answer, `answer` the results of its calls."""

    def ask(self, talk: Talk, *, streamed: bool, one: bool = False) -> None: ...

    def answer(self, talk: Talk) -> None: ...


def result_of(call: Call) -> str:
    return f"In the {call.arguments['place']} is a heron."


class Chats:
    reason = "tool_calls"

    def __init__(self, url: str, key: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    def ask(self, talk: Talk, *, streamed: bool, one: bool = False) -> None:
        asked: Any = {
            "model": "tools",
            "messages": talk.said,
            "tools": [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}],
            "tool_choice": "required",
            "parallel_tool_calls": not one,
            "max_completion_tokens": ROOM,
            "temperature": TEMPERATURE,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        }
        if streamed:
            with self._client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                whole = stream.get_final_completion()
        else:
            whole = self._client.chat.completions.create(**asked)
        message = whole.choices[0].message
        called: list[Any] = list(message.tool_calls or [])
        talk.said.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for each in talk.said[-1].get("tool_calls", ()):
            each["function"].pop("parsed_arguments", None)
        talk.calls = [Call(each.id, each.function.name, json.loads(each.function.arguments)) for each in called]
        talk.reason = whole.choices[0].finish_reason
        talk.prompt_tokens = 0 if whole.usage is None else whole.usage.prompt_tokens

    def answer(self, talk: Talk) -> None:
        talk.said += [{"role": "tool", "tool_call_id": each.id, "content": result_of(each)} for each in talk.calls]


class Messages:
    reason = "tool_use"

    def __init__(self, url: str, key: str) -> None:
        self._client = anthropic.Anthropic(base_url=url, auth_token=key, api_key=None, max_retries=0)

    def _asked(self, talk: Talk) -> Any:
        return {
            "model": "tools",
            "messages": talk.said,
            "tools": [{**LOOK, "input_schema": SCHEMA}],
            "thinking": {"type": "disabled"},
        }

    def ask(self, talk: Talk, *, streamed: bool, one: bool = False) -> None:
        choice = {"type": "any", "disable_parallel_tool_use": one}
        hot = {"temperature": TEMPERATURE}  # which this client has no argument for
        asked = {**self._asked(talk), "tool_choice": choice, "max_tokens": ROOM, "extra_body": hot}
        if streamed:
            with self._client.messages.stream(**asked) as stream:
                whole = stream.get_final_message()
        else:
            whole = self._client.messages.create(**asked)
        used: list[Any] = [block for block in whole.content if block.type == "tool_use"]
        talk.said.append({"role": "assistant", "content": [block.model_dump() for block in whole.content]})
        talk.calls = [Call(block.id, block.name, block.input) for block in used]
        talk.reason = whole.stop_reason
        talk.prompt_tokens = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

    def answer(self, talk: Talk) -> None:
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": [{"type": "text", "text": result_of(each)}]}
            for each in talk.calls
        ]
        talk.said.append({"role": "user", "content": results})

    def count(self, talk: Talk) -> int:
        return self._client.messages.count_tokens(**self._asked(talk)).input_tokens


class Responses:
    reason = "completed"

    def __init__(self, url: str, key: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    def ask(self, talk: Talk, *, streamed: bool, one: bool = False) -> None:
        asked: Any = {
            "model": "tools",
            "input": talk.said,
            "tools": [{"type": "function", **LOOK, "parameters": SCHEMA}],
            "tool_choice": "required",
            "parallel_tool_calls": not one,
            "max_output_tokens": ROOM,
            "temperature": TEMPERATURE,
            "reasoning": {"effort": "none"},
        }
        if streamed:
            with self._client.responses.stream(**asked) as stream:
                whole = stream.get_final_response()
        else:
            whole = self._client.responses.create(**asked)
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in whole.output]
        talk.said += output
        called = [item for item in output if item["type"] == "function_call"]
        talk.calls = [Call(each["call_id"], each["name"], json.loads(each["arguments"])) for each in called]
        talk.reason = whole.status
        talk.prompt_tokens = 0 if whole.usage is None else whole.usage.input_tokens

    def answer(self, talk: Talk) -> None:
        talk.said += [
            {"type": "function_call_output", "call_id": each.id, "output": result_of(each)} for each in talk.calls
        ]


DIALECTS = {"chats": Chats, "messages": Messages, "responses": Responses}
