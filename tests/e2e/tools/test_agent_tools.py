"""Tools in three dialects on a real vLLM whose model's template has them, with the dialects' own clients."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anthropic
import httpx
import openai
import pytest

from skyrl.chat.dialects.parts import as_object
from tests.environments import ROOT, environment

from .conftest import KEY
from .frameworks import CASES, TURNS

pytestmark = pytest.mark.vllm


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


FRAMEWORKS, PROGRAM = ROOT / "requirements" / "agent-frameworks.txt", Path(__file__).with_name("frameworks.py")


@dataclass
class Session:
    id: str
    key: str
    url: str

    def turns(self) -> list[dict[str, Any]]:
        path = f"{self.url}/api/v1/agent_sessions/{self.id}/turns"
        return httpx.get(path, headers={"X-API-Key": KEY}, trust_env=False, timeout=60).json()["rows"]


@pytest.fixture
def session(url: str) -> Session:
    return made_at(url)


def made_at(url: str, thinking: str = "keep") -> Session:
    """Without thoughts, the template begins an answer behind empty ones, which it drops later: kept, turns go on."""
    answer = httpx.post(
        f"{url}/api/v1/agent_sessions",
        headers={"X-API-Key": KEY},
        json={"model": "tools", "thinking": thinking},
        trust_env=False,
        timeout=60,
    )
    made = answer.json()
    return Session(made["session_id"], made["key"], url)


streams = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
mostly_streams = pytest.mark.parametrize(
    "streamed", [pytest.param(False, marks=pytest.mark.slow, id="whole"), pytest.param(True, id="streamed")]
)
dialects = pytest.mark.parametrize("dialect", list(DIALECTS))


@dialects
@streams
def test_a_call_is_answered_and_its_result_continues_the_turn(session: Session, dialect: str, streamed: bool) -> None:
    client, talk = DIALECTS[dialect](session.url, session.key), Talk()
    client.ask(talk, streamed=streamed)
    assert talk.reason == client.reason
    assert talk.calls
    assert {call.name for call in talk.calls} == {"look"}
    assert all(call.arguments["place"] in PLACES for call in talk.calls)
    client.answer(talk)
    client.ask(talk, streamed=streamed)
    assert talk.calls
    first, second = session.turns()
    assert [first["parent"], second["parent"]] == [None, first["id"]]
    assert second["fork"] is None
    assert "</think>" in second["template_note"]
    before = [*first["added_tokens"], *first["sampled_tokens"], *second["added_tokens"]]
    assert second["usage"]["prompt"] == talk.prompt_tokens == len(before)


def test_a_turn_that_the_template_writes_otherwise_later_forks(url: str) -> None:
    session = made_at(url, thinking="template")
    client, talk = DIALECTS["chats"](session.url, session.key), Talk()
    client.ask(talk, streamed=True)
    client.answer(talk)
    client.ask(talk, streamed=True)
    first, second = session.turns()
    assert (second["parent"], second["fork"]) == (None, "template_rewrites")
    assert "</think>" in second["template_note"]
    assert second["usage"]["prompt"] == talk.prompt_tokens == len(second["added_tokens"])


@dialects
@mostly_streams
def test_a_tenant_calls_tools_without_a_session(url: str, dialect: str, streamed: bool) -> None:
    client, talk = DIALECTS[dialect](url, KEY), Talk()
    client.ask(talk, streamed=streamed, one=True)
    assert [call.name for call in talk.calls] == ["look"]
    client.answer(talk)
    client.ask(talk, streamed=streamed, one=True)
    assert len(talk.calls) == 1, "one at a time"
    assert talk.reason == client.reason


def test_tokens_are_counted_as_the_same_request_has_them(session: Session) -> None:
    for client in (Messages(session.url, session.key), Messages(session.url, KEY)):
        talk = Talk()
        for _ in range(2):
            counted = client.count(talk)
            client.ask(talk, streamed=False)
            assert counted == talk.prompt_tokens
            client.answer(talk)


@streams
def test_thoughts_come_apart_in_each_dialect_and_are_continued(url: str, streamed: bool) -> None:
    session = made_at(url, thinking="template")
    api = openai.OpenAI(base_url=f"{session.url}/v1", api_key=session.key, max_retries=0)
    other = anthropic.Anthropic(base_url=session.url, auth_token=session.key, api_key=None, max_retries=0)
    asked: Any = {"model": "tools", "max_tokens": 30, "messages": TASK}
    if streamed:
        deltas = [
            chunk.choices[0].delta for chunk in api.chat.completions.create(**asked, stream=True) if chunk.choices
        ]
        thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        with other.messages.stream(**asked) as stream:
            message = stream.get_final_message()
        with api.responses.stream(model="tools", input=TASK, max_output_tokens=30) as events:
            response: Any = events.get_final_response()
    else:
        said: Any = api.chat.completions.create(**asked).choices[0].message
        thought = said.reasoning
        message = other.messages.create(**asked)
        response = api.responses.create(model="tools", input=TASK, max_output_tokens=30)
    assert thought
    block = message.content[0]
    assert block.type == "thinking"
    assert block.thinking
    assert response.output[0].type == "reasoning"
    more: Any = [{"role": "assistant", "content": message.content}, {"role": "user", "content": "And at night?"}]
    other.messages.create(**{**asked, "messages": [*TASK, *more]})
    *before, last = session.turns()
    same = {turn["id"] for turn in before if turn["answer"]["reasoning"] == block.thinking}
    assert last["parent"] in same, "also the other clients may have been answered so"
    assert last["fork"] is None


@streams
def test_a_stop_sequence_is_named(session: Session, streamed: bool) -> None:
    other = anthropic.Anthropic(base_url=session.url, auth_token=session.key, api_key=None, max_retries=0)
    asked: Any = {"model": "tools", "max_tokens": 60, "messages": TASK, "stop_sequences": list("aeiou")}
    message: Any = None
    for _ in range(5):  # a sample may end before its first vowel
        if streamed:
            with other.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = other.messages.create(**asked)
        if message.stop_reason == "stop_sequence":
            break
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence in list("aeiou")


@streams
def test_a_prompt_that_is_too_long_gets_each_dialects_own_error(session: Session, streamed: bool) -> None:
    long: Any = [{"role": "user", "content": "river " * 20_000}]
    api: Any = openai.OpenAI(base_url=f"{session.url}/v1", api_key=session.key, max_retries=0)
    other = anthropic.Anthropic(base_url=session.url, auth_token=session.key, api_key=None, max_retries=0)
    with pytest.raises(openai.BadRequestError) as chat:
        api.chat.completions.create(model="tools", messages=long, stream=streamed)
    assert chat.value.code == "context_length_exceeded"
    if streamed:  # Codex reads the code in a stream alone
        *_, failed = api.responses.create(model="tools", input=long, stream=True)
        assert (failed.type, failed.response.error.code) == ("response.failed", "context_length_exceeded")
    else:
        with pytest.raises(openai.BadRequestError) as response:
            api.responses.create(model="tools", input=long)
        assert response.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        other.messages.create(model="tools", max_tokens=5, messages=long, stream=streamed)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["openai-agents", "litellm"])
def test_conversations_of_a_framework_are_one_row_each(url: str, framework: str, tmp_path: Path) -> None:
    sessions = [made_at(url) for _ in CASES]
    command = [environment(FRAMEWORKS), str(PROGRAM), framework, url, *(session.key for session in sessions)]
    own = {"HOME": str(tmp_path), "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for asked, session in zip(json.loads(done.stdout.splitlines()[-1]), sessions, strict=True):
        turns = session.turns()
        assert len(turns) == TURNS
        assert [turn["fork"] for turn in turns] == [None] * len(turns)
        assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]
        called = [call for turn in turns for call in turn["answer"].get("tool_calls") or ()]
        sampled = [json.loads(as_object(call["function"]["arguments"])) for call in called]
        assert asked == sampled, "the framework has run what was sampled"
