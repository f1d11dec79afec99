"""Answers of a chat in the shape of OpenAI's Responses, read by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx2
import pytest
from chat_answers import Piece, Told, same_message, told
from hypothesis import given
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import AnswerEncoder
from skyrl.chat.dialects.responses import to_chat
from skyrl.chat.dialects.responses.answer import ALIVE
from skyrl.chat.openai.errors import OpenAIError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED: dict[str, Any] = {
    "model": "tiny",
    "input": "hi",
    "instructions": "Be brief.",
    "tools": [
        {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False},
        {
            "type": "namespace",
            "name": "fs",
            "description": "Files.",
            "tools": [{"type": "function", "name": "read_file", "parameters": {"type": "object"}}],
        },
        {"type": "custom", "name": "patch"},
    ],
}
KEPT = ("type", "role", "name", "namespace", "call_id", "arguments", "input", "content", "summary", "encrypted_content")


def encoder() -> AnswerEncoder:
    return to_chat(json.dumps(ASKED).encode(), None, "resp_1").encoder


def whole(answer: Told) -> dict[str, Any]:
    return json.loads(encoder().whole(answer.whole()))


def streamed(answer: Told) -> bytes:
    writer = encoder()
    return b"".join(writer.events(chunk) for chunk in answer.chunks()) + writer.end()


def events_in(stream: bytes) -> list[dict[str, Any]]:
    frames = [frame.split(b"\n") for frame in stream.split(b"\n\n") if frame and not frame.startswith(b":")]
    contents = [json.loads(lines[1].removeprefix(b"data: ")) for lines in frames]
    assert [b"event: " + content["type"].encode() for content in contents] == [lines[0] for lines in frames]
    return contents


def client_of(body: bytes, kind: str) -> OpenAI:
    """OpenAI's client, whose every request is answered with this body."""
    answer = httpx2.MockTransport(lambda _: httpx2.Response(200, headers={"content-type": kind}, content=body))
    return OpenAI(api_key="key", base_url="http://server/v1", http_client=httpx2.Client(transport=answer))


def accumulated(stream: bytes) -> list[dict[str, Any]]:
    """The items that OpenAI's client gives from a stream. It fails at a piece of an item that has not begun."""
    with client_of(stream, "text/event-stream").responses.stream(model="tiny", input="hi") as events:
        return [event.item.to_dict() for event in events if event.type == "response.output_item.done"]


def sent_back(output: list[dict[str, Any]], *, stateless: bool = False) -> dict[str, Any] | None:
    """The assistant's message of the chat, when a client sends the items back: unchanged, or as clients do that keep no
    ids, no states and of reasoning nothing but `encrypted_content`."""
    if stateless:
        output = [{key: item[key] for key in KEPT if key in item} for item in output]
        output = [item | {"content": None} if item["type"] == "reasoning" else item for item in output]
    asked = ASKED | {"input": [{"role": "user", "content": "hi"}, *output]}
    messages = to_chat(json.dumps(asked).encode(), None, "resp_2").chat["messages"]
    assert len(messages) <= 3
    return messages[2] if len(messages) == 3 else None


def plain(**changes: Any) -> Told:
    return Told(**{"reasoning": "", "content": "", "calls": (), "pieces": (), "finish_reason": "stop"} | changes)


def called(name: str, arguments: str) -> Told:
    return plain(calls=((name, arguments),), pieces=(Piece("call", arguments),), finish_reason="tool_calls")


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in response.items() if key != "created_at"}


@given(told())
def test_a_stream_ends_with_the_same_response_as_the_whole_answer(answer: Told) -> None:
    assert comparable(events_in(streamed(answer))[-1]["response"]) == comparable(whole(answer))


@given(told(shuffled=True))
def test_the_events_are_openais_and_their_pieces_are_the_items(answer: Told) -> None:
    stream = streamed(answer)
    events = events_in(stream)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == f"response.{'incomplete' if answer.finish_reason == 'length' else 'completed'}"
    items = last["response"]["output"]
    assert accumulated(stream) == items
    for number, item in enumerate(items):
        pieces = [event for event in events if event.get("output_index") == number and event["type"].endswith("delta")]
        assert {piece["item_id"] for piece in pieces} <= {item["id"]}
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(piece["delta"] for piece in pieces) == text


@given(told(shuffled=True))
def test_an_answer_that_a_client_sends_back_is_the_same_message_of_the_chat(answer: Told) -> None:
    for output in (whole(answer)["output"], accumulated(streamed(answer))):
        for stateless in (False, True):
            assert same_message(sent_back(output, stateless=stateless) or {}) == same_message(answer.message)


def test_the_order_of_the_events() -> None:
    pieces = (Piece("reasoning", "hm"), Piece("content", "o"), Piece("content", "k"), Piece("call", "{}"))
    answer = plain(reasoning="hm", content="ok", calls=(("add", "{}"),), pieces=pieces)
    assert [event["type"].removeprefix("response.") for event in events_in(streamed(answer))] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_a_response_has_the_requests_fields_the_items_and_the_usage() -> None:
    answer = plain(reasoning="hm", content="ok", calls=(("add", '{"b": 1.0}'),), finish_reason="tool_calls")
    response = client_of(encoder().whole(answer.whole()), "application/json").responses.create(**ASKED)
    Response.model_validate(response.to_dict())
    assert (response.id, response.status, response.model) == ("resp_1", "completed", "tiny")
    assert response.output_text == "ok"
    assert [(item.type, item.id) for item in response.output] == [
        ("reasoning", "rs_1_0"),
        ("message", "msg_1_1"),
        ("function_call", "fc_1_2"),
    ]
    assert response.instructions == "Be brief."
    assert response.to_dict()["tools"] == ASKED["tools"]
    assert response.usage is not None
    assert response.usage.to_dict() == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 27,
    }


def test_an_answer_that_max_output_tokens_cuts_is_incomplete() -> None:
    response = whole(plain(reasoning="hm", content="ok", finish_reason="length"))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_a_call_of_a_tool_in_a_namespace_names_both() -> None:
    for output in (whole(called("read_file", "{}"))["output"], accumulated(streamed(called("read_file", "{}")))):
        assert output[0]["name"] == "read_file"
        assert output[0]["namespace"] == "fs"


@pytest.mark.parametrize("text", ["*** Begin\n+a", ""])
def test_a_call_of_a_custom_tool_has_a_text_and_comes_back_as_the_call_that_it_was(text: str) -> None:
    answer = called("patch", json.dumps({"input": text}))
    stream = streamed(answer)
    assert ALIVE in stream
    kinds = [event["type"].removeprefix("response.") for event in events_in(stream)][2:-1]
    assert kinds == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    for output in (whole(answer)["output"], accumulated(stream)):
        assert (output[0]["type"], output[0]["name"], output[0]["input"]) == ("custom_tool_call", "patch", text)
        assert same_message(sent_back(output) or {}) == same_message(answer.message)


def test_a_custom_tool_gets_arguments_of_another_form_as_they_are() -> None:
    for arguments in ("*** Begin", '{"patch": "a"}', "[1]"):
        assert whole(called("patch", arguments))["output"][0]["input"] == arguments


def test_a_tool_that_the_request_does_not_have_is_called_by_the_name_that_the_model_wrote() -> None:
    item = whole(called("nonesuch", "{}"))["output"][0]
    assert (item["type"], item["name"], "namespace" in item) == ("function_call", "nonesuch", False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OpenAIError("too long", code="context_length_exceeded"), "context_length_exceeded"),
        (RequestError("This model's maximum context length is 9 tokens."), "context_length_exceeded"),
        (RequestError("wait", status=429), "rate_limit_exceeded"),
        (OpenAIError("away", status=503, code="inference_failed"), "server_error"),
        (RequestError("wrong"), "invalid_prompt"),
    ],
)
def test_a_stream_that_fails_says_why_also_before_its_first_chunk(error: RequestError, code: str) -> None:
    begun = encoder()
    for writer, stream in ((begun, begun.events(plain().chunks()[0])), (encoder(), b"")):
        events = events_in(stream + writer.failed(error))
        kinds = [event["type"] for event in events]
        assert kinds == ["response.created", "response.in_progress", "response.failed"]
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"] == {"code": code, "message": error.message}
        assert [event["sequence_number"] for event in events] == [0, 1, 2]
        EVENT.validate_python(cast("dict[str, Any]", events[0]))
