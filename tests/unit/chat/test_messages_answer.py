"""Answers of a chat in the shape of Anthropic's Messages, read by Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, APIStatusError
from chat_answers import Piece, Told, same_message, told
from hypothesis import given

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.messages import error_body, to_chat
from skyrl.chat.dialects.messages.answer import MessagesEncoder
from skyrl.chat.dialects.parts import NOT_AN_OBJECT
from skyrl.chat.openai.errors import OpenAIError

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def whole(answer: Told) -> dict[str, Any]:
    return json.loads(MessagesEncoder().whole(answer.whole()))


def streamed(answer: Told) -> bytes:
    encoder = MessagesEncoder()
    return b"".join(encoder.events(chunk) for chunk in answer.chunks()) + encoder.end()


def client_of(body: bytes, kind: str) -> Anthropic:
    """Anthropic's client, whose every request is answered with this body."""
    answer = httpx2.MockTransport(lambda _: httpx2.Response(200, headers={"content-type": kind}, content=body))
    return Anthropic(api_key="key", base_url="http://server", http_client=httpx2.Client(transport=answer))


def accumulated(stream: bytes) -> dict[str, Any]:
    """The message that Anthropic's client puts together from a stream."""
    with client_of(stream, "text/event-stream").messages.stream(**ASKED) as events:
        return events.get_final_message().to_dict()


def events_in(stream: bytes) -> list[dict[str, Any]]:
    frames = [frame.split(b"\n") for frame in stream.split(b"\n\n") if frame]
    contents = [json.loads(lines[1].removeprefix(b"data: ")) for lines in frames]
    assert [b"event: " + content["type"].encode() for content in contents] == [lines[0] for lines in frames]
    return contents


def sent_back(message: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message of the chat, when a client sends the answer back."""
    asked = ASKED | {"messages": [{"role": "assistant", "content": message["content"]}]}
    return to_chat(json.dumps(asked).encode()).chat["messages"][0]


def merged(message: dict[str, Any]) -> dict[str, Any]:
    """The message, whose texts are one block and whose thinking is one block before it."""
    texts = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    thinking = "".join(block["thinking"] for block in message["content"] if block["type"] == "thinking")
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    return message | {"content": [thinking.strip(), texts.strip(), *calls]}


def plain(**changes: Any) -> Told:
    return Told(**{"reasoning": "", "content": "", "calls": (), "pieces": (), "finish_reason": "stop"} | changes)


@given(told())
def test_a_stream_gives_the_same_message_as_the_whole_answer(answer: Told) -> None:
    assert {key: value for key, value in accumulated(streamed(answer)).items() if key in whole(answer)} == whole(answer)


@given(told(shuffled=True))
def test_text_between_and_after_calls_is_not_lost_and_the_whole_is_the_same(answer: Told) -> None:
    message = accumulated(streamed(answer))
    assert merged({key: value for key, value in message.items() if key in whole(answer)}) == merged(whole(answer))


@given(told(shuffled=True))
def test_an_answer_that_a_client_sends_back_is_the_same_message_of_the_chat(answer: Told) -> None:
    for message in (whole(answer), accumulated(streamed(answer))):
        assert same_message(sent_back(message)) == same_message(answer.message)


@given(told(shuffled=True))
def test_the_events_come_in_anthropics_order(answer: Told) -> None:
    kinds = [(event["type"], event.get("index")) for event in events_in(streamed(answer)) if event["type"] != "ping"]
    assert kinds[0] == ("message_start", None)
    assert kinds[-2:] == [("message_delta", None), ("message_stop", None)]
    open_block = -1
    for kind, number in kinds[1:-2]:
        if kind == "content_block_start":
            open_block += 1
        assert number == open_block
    begun = [kind for kind, _ in kinds[1:-2] if kind != "content_block_delta"]
    assert begun == ["content_block_start", "content_block_stop"] * (open_block + 1)


def test_an_answer_has_thinking_text_and_calls() -> None:
    answer = plain(reasoning="hm", content="ok", calls=(("add", '{"b": 1.0, "a": 2}'),), finish_reason="tool_calls")
    message = client_of(MessagesEncoder().whole(answer.whole()), "application/json").messages.create(**ASKED)
    assert message.id == "msg_7"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert list(message.to_dict()["content"][2]["input"].items()) == [("b", 1.0), ("a", 2)]  # type: ignore[index]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == 4
    assert message.usage.cache_read_input_tokens == 16
    assert message.usage.output_tokens == 7


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", '{"a": ', '"x"', "NaN", '{"a": "\\ud800"}'])
def test_arguments_that_are_no_json_object_are_kept_as_a_text(arguments: str) -> None:
    message = whole(plain(calls=(("add", arguments),)))
    assert message["content"][0]["input"] == {NOT_AN_OBJECT: arguments}
    assert sent_back(message)["tool_calls"][0]["function"]["arguments"] == arguments


def test_the_pieces_of_a_calls_input_are_pings_until_it_is_complete() -> None:
    encoder = MessagesEncoder()
    piece = {"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a"'}}
    first = {"id": "chatcmpl-7", "model": "tiny", "choices": [{"delta": {"tool_calls": [piece]}}]}
    kinds = [event["type"] for event in events_in(encoder.events(json.dumps(first).encode()))]
    assert kinds == ["message_start", "content_block_start", "ping"]


@pytest.mark.parametrize(
    ("finish", "stop", "calls", "expected"),
    [
        ("stop", None, (), ("end_turn", None)),
        ("stop", 7, (), ("end_turn", None)),
        ("stop", "END", (), ("stop_sequence", "END")),
        ("length", None, (), ("max_tokens", None)),
        ("length", None, (("add", "{}"),), ("max_tokens", None)),
        ("tool_calls", None, (("add", "{}"),), ("tool_use", None)),
        ("stop", None, (("add", "{}"),), ("tool_use", None)),
        ("stop", "END", (("add", "{}"),), ("tool_use", None)),
        ("stop", "END", (("add", '{"a'),), ("stop_sequence", "END")),
    ],
)
def test_why_an_answer_ended(finish: str, stop: Any, calls: Any, expected: tuple[str, str | None]) -> None:
    answer = json.loads(plain(calls=calls, finish_reason=finish).whole())
    answer["choices"][0]["stop_reason"] = stop
    message = json.loads(MessagesEncoder().whole(json.dumps(answer).encode()))
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_a_stream_that_fails_ends_with_an_error_that_the_client_raises() -> None:
    encoder = MessagesEncoder()
    answer = plain(content="ok", pieces=(Piece("content", "ok"),))
    stream = b"".join(encoder.events(chunk) for chunk in answer.chunks()[:2])
    stream += encoder.failed(OpenAIError("The inference server is away.", status=503))
    with pytest.raises(APIStatusError, match="The inference server is away"):
        accumulated(stream)


def test_an_answer_that_is_no_chat_completion_is_an_error_of_the_server() -> None:
    for answer in (b"{}", b"no", b'{"id": 1}'):
        with pytest.raises(RequestError) as error:
            MessagesEncoder().whole(answer)
        assert error.value.status == 503


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_each_status_has_anthropics_type_of_error(status: int, kind: str) -> None:
    assert error_body(status, "must be known", "model").error.type == kind
    assert error_body(status, "must be known", "model").error.message == "model: must be known"


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_make_agents_compact() -> None:
    limit = "This model's maximum context length is 4096 tokens. However, your prompt contains "
    tokens = error_body(400, f"{limit}at least 4097 input tokens, which exceeds this limit even without any output.")
    assert tokens.error.message == "prompt is too long: 4097 tokens > 4096 maximum"
    assert tokens.error.type == "invalid_request_error"
    letters = f"{limit}90000 characters (more than 8192 characters, the upper bound for 4096 input tokens)."
    assert error_body(400, letters).error.message == f"prompt is too long: {letters}"
    own = error_body(400, "the context is full", "messages", "context_length_exceeded")
    assert own.error.message == "prompt is too long: the context is full"
