"""Frames of a stream in any pieces, and the counts that are read from its events."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from skyrl.chat.openai.errors import code_in, refusal_of
from skyrl.chat.openai.exchanges import DONE, EventRewriter, Events, rewritten
from skyrl.http.answers import Answer
from skyrl.http.client import AnswerStream
from skyrl.http.connection import Interrupted
from skyrl.sampling.completion import AbortedAnswer, MalformedAnswer
from skyrl.sampling.metrics import Used

WIRE = b': ping\n\ndata: {"a": "x\\n\\n"}\n\ndata:{"b": 2}\n\ndata: [DONE]\n\n'


class Pieces:
    """The body of an answer, in pieces; tests/component/api/test_openai_failures.py reads real ones."""

    def __init__(self, content: bytes, size: int) -> None:
        self._pieces = [content[start : start + size] for start in range(0, len(content), size)]

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


def events_of(content: bytes, size: int, most: int = 1000) -> Events:
    return Events(cast(AnswerStream, Pieces(content, size)), most)


@pytest.mark.parametrize("size", range(1, len(WIRE) + 1))
async def test_events_are_the_same_in_pieces_of_any_size(size: int) -> None:
    events = events_of(WIRE, size)
    assert [await events.next() for _ in range(3)] == [b'{"a": "x\\n\\n"}', b'{"b": 2}', DONE]
    with pytest.raises(Interrupted):
        await events.next()


async def test_a_stream_that_is_too_long_is_interrupted() -> None:
    events = events_of(b"data: " + b"x" * 100, 10, most=50)
    with pytest.raises(Interrupted, match="larger than any right answer"):
        await events.next()


def event(index: int, prompt: int, sampled: int, finish: str | None = None) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
    return json.dumps(
        {"model": "secret", "choices": [{"index": index, "finish_reason": finish}], "usage": usage}
    ).encode()


def test_a_stream_that_breaks_off_counts_each_prompt_once_and_the_tokens_of_each_choice() -> None:
    rewriter = EventRewriter("mine", 2, include_usage=False, continuous_usage=False)
    for index, prompt, sampled in ((0, 5, 1), (1, 5, 1), (1, 5, 4), (2, 7, 3), (0, 5, 2)):
        shown: Any = json.loads(rewriter.rewrite(event(index, prompt, sampled)) or b"")
        assert shown == {"model": "mine", "choices": [{"index": index, "finish_reason": None}]}
    assert rewriter.used == Used(12, 0, 9)


def test_the_usage_at_the_end_counts_if_there_is_one() -> None:
    rewriter = EventRewriter("mine", 1, include_usage=False, continuous_usage=False)
    rewriter.rewrite(event(0, 5, 1))
    total = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}
    assert rewriter.rewrite(json.dumps({"choices": [], "usage": total}).encode()) is None
    assert rewriter.used == Used(5, 5, 2)


def test_a_stream_counts_the_choices_that_have_ended_and_those_at_their_bound() -> None:
    rewriter = EventRewriter("mine", 3, include_usage=False, continuous_usage=False)
    for index, finish in ((0, None), (0, "length"), (1, "stop"), (2, None)):
        rewriter.rewrite(event(index, 5, 1, finish))
    assert (rewriter.used.samples, rewriter.used.truncated) == (2, 1)
    whole = {"choices": [{"index": 0, "finish_reason": "length"}, {"index": 1, "finish_reason": "stop"}]}
    used = rewritten(json.dumps(whole).encode(), "mine")[1]
    assert (used.samples, used.truncated) == (2, 1)


def test_negative_numbers_of_tokens_count_as_none() -> None:
    rewriter = EventRewriter("mine", 1, include_usage=False, continuous_usage=False)
    rewriter.rewrite(event(0, -2, -1))
    assert rewriter.used == Used()
    total = {"prompt_tokens": -2, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": -3}}
    assert rewritten(json.dumps({"choices": [], "usage": total}).encode(), "mine")[1] == Used()


def test_an_answer_without_usage_counts_nothing() -> None:
    body, used = rewritten(b'{"model": "secret", "choices": [], "x": 1}', "mine")
    assert json.loads(body) == {"model": "mine", "choices": []}
    assert used == Used()


def test_an_aborted_answer_and_one_that_is_none_are_told_apart() -> None:
    with pytest.raises(AbortedAnswer, match="abort"):
        rewritten(event(0, 1, 1, "abort"), "mine")
    for content in (b"{", b"[]", b"{}", b"\xff", b'{"choices": 1}'):
        with pytest.raises(MalformedAnswer):
            rewritten(content, "mine")
    for finish in ("stop", "length", "tool_calls"):
        rewritten(event(0, 1, 1, finish), "mine")


CALL = {"function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("said", "finish", "shown"),
    [
        ({"content": None, "reasoning": "I think"}, "tool_calls", "stop"),
        ({"content": "", "tool_calls": []}, "tool_calls", "stop"),
        ({"content": None, "tool_calls": [CALL]}, "tool_calls", "tool_calls"),
        ({"content": "a"}, "length", "length"),
    ],
)
def test_an_answer_that_calls_no_tool_does_not_say_that_it_does(said: Any, finish: str, shown: str) -> None:
    choices = [{"index": 0, "message": said, "finish_reason": finish, "logprobs": {"content": [{"logprob": -0.1}]}}]
    body, _ = rewritten(json.dumps({"model": "m", "choices": choices}).encode(), "mine")
    (choice,) = json.loads(body)["choices"]
    assert choice == choices[0] | {"finish_reason": shown}


def test_a_stream_that_calls_no_tool_does_not_say_that_it_does() -> None:
    """Choice 1 has called a tool, choice 0 has not."""
    rewriter = EventRewriter("mine", 2, include_usage=False, continuous_usage=False)

    def told(index: int, delta: Any, finish: str | None) -> str | None:
        choices = [{"index": index, "delta": delta, "finish_reason": finish}]
        shown = rewriter.rewrite(json.dumps({"choices": choices}).encode())
        assert shown is not None
        (choice,) = json.loads(shown)["choices"]
        assert choice["delta"] == delta
        return choice["finish_reason"]

    assert told(0, {"reasoning": "Hm"}, None) is None
    assert told(1, {"tool_calls": [CALL]}, None) is None
    assert told(0, {}, "tool_calls") == "stop"
    assert told(1, {}, "tool_calls") == "tool_calls"


@pytest.mark.parametrize(
    ("told", "field", "key"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            "tools",
            "tool_call",
        ),
        ('tool_choice="required" requires --tool-call-parser to be set', "tools", "tool_call"),
        ("Please set --reasoning-parser and/or --reasoning-config", "thinking_token_budget", "reasoning"),
    ],
)
def test_a_refusal_that_names_an_option_of_vllm_names_the_key_of_this_server(told: str, field: str, key: str) -> None:
    body = json.dumps({"error": {"message": told, "type": "BadRequestError", "param": None, "code": 400}}).encode()
    refusal = refusal_of(Answer(400, body), "run@3", "mine")
    assert (refusal.status, refusal.field) == (400, field)
    assert "--" not in refusal.message
    assert f'"generator.inference_engine.engine_init_kwargs": {{"{key}_parser"' in refusal.message


def test_a_refusal_of_a_chat_without_a_template_advises_what_this_server_takes() -> None:
    """vLLM advises a field of the request, which this server refuses."""
    told = (
        "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if "
        "the tokenizer does not define one."
    )
    body = json.dumps({"error": {"message": told, "type": "BadRequestError", "param": None, "code": 400}}).encode()
    refusal = refusal_of(Answer(400, body), "run@3", "mine")
    assert (refusal.status, refusal.field) == (400, "messages")
    assert "transformers" not in refusal.message
    assert "/v1/completions" in refusal.message
    assert "chat_template.jinja" in refusal.message


def test_a_stop_by_a_token_is_told_as_a_stop() -> None:
    """OpenAI's clients, and all that reads the answer here, know no other word for it."""
    choices = [
        {"index": 0, "text": "\u00e9", "finish_reason": "stop_token", "stop_reason": 2, "logprobs": {"a": -0.1}},
        {"index": 1, "text": "stop_token", "finish_reason": "length"},
    ]
    content = json.dumps({"model": "secret", "choices": choices}).encode()
    told = [choices[0] | {"finish_reason": "stop"}, choices[1]]
    assert json.loads(rewritten(content, "mine")[0]) == {"model": "mine", "choices": told}
    rewriter = EventRewriter("mine", 2, include_usage=False, continuous_usage=False)
    assert json.loads(rewriter.rewrite(content) or b"") == {"model": "mine", "choices": told}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"error": {"code": 400}}', 400),
        (b'{"error": {"code": 200}}', 500),
        (b'{"error": "x"}', 500),
        (b'{"error"', 500),
    ],
)
def test_the_status_of_an_error_event(content: bytes, status: int) -> None:
    assert code_in(content) == status
