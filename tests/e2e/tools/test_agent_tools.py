"""Tools in three dialects on a real vLLM whose model's template has them, with the dialects' own clients."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from skyrl.chat.dialects.parts import as_object
from tests.environments import ROOT, environment

from .conftest import KEY
from .frameworks import CASES, TURNS
from .tool_dialects import DIALECTS, PLACES, TASK, Messages, Talk

pytestmark = pytest.mark.vllm

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
