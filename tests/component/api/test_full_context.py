"""A context that is full: one rule for all dialects, and the sample whose `max_tokens` is cut to what fits."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
import tinker
from api_harness import BASE, Api, Serve, sample_body
from fake_upstream import FakeUpstream, Received, error, reply
from openai_requests import answer_of, complete
from tinker._base_client import _log_deprecation_note

from skyrl.base.tiny import model_path
from skyrl.sampling import service

CONTEXT = 100
"""That of the server that the tests start."""
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"model": BASE, "prompt": "hi"}),
    "chat": ("/v1/chat/completions", CHAT),
    "messages": ("/v1/messages", CHAT | {"max_tokens": 9}),
    "responses": ("/v1/responses", {"model": BASE, "input": "hi"}),
}
FULL = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
SENTENCES = {
    FULL: 100,
    "This model's maximum context length is 100 tokens. However, your prompt contains at least 101 input tokens, which "
    "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.": 101,
    "Input length (300) exceeds model's maximum context length (100).": 300,
    "The decoder prompt (length 100) plus the number of requested output tokens (at least 1) is longer than the "
    "maximum model length of 100. Make sure that `max_model_len` is no smaller than the number of text tokens.": 100,
}
"""vLLM 0.32's sentences, each with the number of tokens of the prompt."""


async def ask(api: Api, dialect: str, **changes: Any) -> httpx.Response:
    path, body = REQUESTS[dialect]
    return await api.http.post(path, json=body | changes, headers={"Authorization": "Bearer tml-one"})


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("dialect", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_context_has_one_code_in_each_dialects_shape(
    api: Api, upstream: FakeUpstream, dialect: str, sentence: str, stream: bool
) -> None:
    upstream.default = upstream.controls["/v1/chat/completions"] = error(400, sentence, "max_tokens")
    answer = await ask(api, dialect, stream=stream)
    tokens = SENTENCES[sentence]
    if dialect == "messages":
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        message = answer.json()["error"]["message"]
        assert message.startswith("prompt is too long: ")
    elif dialect == "responses" and stream:  # Codex compacts only where a stream says so
        assert answer.status_code == 200
        failed = json.loads(answer.text.rpartition("data: ")[2])["response"]["error"]
        assert failed["code"] == "context_length_exceeded"
        message = failed["message"]
    else:
        assert answer.status_code == 400
        told = answer.json()["error"]
        assert (told["code"], told["param"]) == (
            "context_length_exceeded",
            "prompt" if dialect == "completions" else "messages",
        )
        message = told["message"]
    assert str(tokens) in message
    assert str(CONTEXT) in message


@pytest.mark.parametrize("dialect", ["completions", "chat"])
async def test_a_request_for_no_token_is_no_full_context(api: Api, upstream: FakeUpstream, dialect: str) -> None:
    upstream.default = upstream.controls["/v1/chat/completions"] = error(400, FULL, "max_tokens")
    told = (await ask(api, dialect, max_tokens=0)).json()["error"]
    assert (told["code"], told["param"]) == (None, "max_tokens")


@pytest.mark.parametrize(
    ("dialect", "field", "sent"),
    [
        ("completions", "max_tokens", "max_tokens"),
        ("chat", "max_tokens", "max_tokens"),
        ("chat", "max_completion_tokens", "max_completion_tokens"),
        ("messages", "max_tokens", "max_completion_tokens"),
        ("responses", "max_output_tokens", "max_completion_tokens"),
    ],
)
async def test_max_tokens_above_the_context_is_cut_without_another_request(
    api: Api, upstream: FakeUpstream, dialect: str, field: str, sent: str
) -> None:
    """vLLM refuses a number above the context, and cuts any other to what fits."""

    async def chat(request: Received, writer: asyncio.StreamWriter) -> None:
        await reply(200, chat_answer(request))(request, writer)

    upstream.default = complete
    upstream.controls["/v1/chat/completions"] = chat
    assert (await ask(api, dialect, **{field: 32_000})).status_code == 200
    (request,) = upstream.requests
    assert request.json[sent] == CONTEXT


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize("prompt", [40, 100])
async def test_a_server_that_does_not_cut_by_itself_is_asked_again(
    api: Api, upstream: FakeUpstream, dialect: str, prompt: int
) -> None:
    """Servers of other kinds behind `external_inference_url` refuse prompt and `max_tokens` together."""
    together = (
        "This model's maximum context length is 100 tokens. However, you requested 190 tokens (90 in the messages, 100 "
        "in the completion). Please reduce the length of the messages or completion."
    )

    async def strict(request: Received, writer: asyncio.StreamWriter) -> None:
        wanted = request.json.get("max_tokens", request.json.get("max_completion_tokens", 0))
        fits = prompt + wanted <= CONTEXT
        await (reply(200, chat_answer(request)) if fits else error(400, together))(request, writer)

    upstream.controls |= {"/v1/chat/completions": strict, "/tokenize": reply(200, {"count": prompt})}
    field = "max_output_tokens" if dialect == "responses" else "max_tokens"
    answer = await ask(api, dialect, **{field: 32_000})
    if prompt < CONTEXT:
        assert answer.status_code == 200
        assert upstream.requests[-1].json["max_tokens"] == CONTEXT - prompt
    else:
        assert answer.status_code == 400
        assert "100 input tokens" in answer.text or "prompt is too long" in answer.text


async def test_tokens_are_counted_of_any_chat_that_is_answered(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.controls["/tokenize"] = reply(200, {"count": 3})
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
    tools = [{"name": "f", "input_schema": schema, "strict": True}]
    async with serve(openai_grammars=True) as api:
        answer = await api.http.post("/v1/messages/count_tokens", json=CHAT | {"tools": tools})
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 3})


@pytest.mark.parametrize("dialect", [*REQUESTS, "agent sessions", "asample"])
async def test_the_answer_names_the_key_where_the_servers_bound_is_below_the_models(
    serve: Serve, upstream: FakeUpstream, dialect: str
) -> None:
    """The tiny model takes 4,096 tokens, and the server 100."""
    upstream.default = upstream.controls["/v1/chat/completions"] = error(400, FULL, "max_tokens")
    upstream.controls["/tokenize"] = reply(200, {"count": CONTEXT})
    async with serve(base_model=str(model_path()), served_model_names=(BASE,)) as api:
        if dialect == "asample":
            sampler = await api.sampler()
            answer = await api.post("asample", sample_body(sampler, 1, prompt=[5] * 100))
        elif dialect == "agent sessions":
            made = (await api.post("agent_sessions", {"model": BASE})).json()
            headers = {"Authorization": f"Bearer {made['key']}"}
            answer = await api.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        else:
            answer = await ask(api, dialect)
    assert answer.status_code == 400
    assert "the model itself takes 4096" in answer.text
    assert "generator.inference_engine.max_model_len" in answer.text


def chat_answer(request: Received) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}
    return answer_of(request) | {"choices": [choice]}


NOTE = "x-deprecation-note"
LENGTH, PROMPT = 100, [5, 6, 7]


async def sample(api: Api, sampler: str, seq_id: int, max_tokens: int | None) -> httpx.Response:
    params = {} if max_tokens is None else {"max_tokens": max_tokens}
    answer = await api.post("asample", sample_body(sampler, seq_id, sampling_params=params))
    assert answer.status_code == 200, answer.text
    return answer


async def test_the_first_cut_sample_of_a_sampling_session_carries_a_note(
    api: Api, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    sampler, other = await api.sampler(), await api.sampler()
    first = await sample(api, sampler, 0, 1_000_000)
    assert first.json()["max_tokens"] == LENGTH - len(PROMPT)
    note = first.headers[NOTE]
    assert note.startswith("sampling_params.max_tokens: 1000000 is more than the 97 tokens that fit ")
    with caplog.at_level(logging.WARNING, logger="tinker"):
        _log_deprecation_note(first)
    assert note in caplog.text, "the SDK shows the note to its user"

    second = await sample(api, sampler, 1, 98)
    assert second.json()["max_tokens"] == 97
    assert NOTE not in second.headers, "a sampling session gets the note once"
    assert NOTE in (await sample(api, other, 0, 98)).headers, "each sampling session gets the note"
    assert (await api.http.get("/statusz")).json()["samples"]["max_tokens_cut"] == 3
    await upstream.until(lambda server: len(server.completions) == 3)
    assert {request.json["max_tokens"] for request in upstream.completions} == {97}


async def test_a_repeat_carries_the_note_again_and_is_not_counted(api: Api) -> None:
    sampler = await api.sampler()
    has_note = [NOTE in (await sample(api, sampler, seq_id, 98)).headers for seq_id in (0, 0, 1, 1, 0)]
    assert has_note == [True, True, False, False, True], "the answer of the first try may be lost"
    assert (await api.http.get("/statusz")).json()["samples"]["max_tokens_cut"] == 2


@pytest.mark.parametrize("max_tokens", [None, 1, 97])
async def test_a_sample_that_fits_carries_no_note(api: Api, max_tokens: int | None) -> None:
    answer = await sample(api, await api.sampler(), 0, max_tokens)
    assert answer.json().keys() == {"request_id", "sample_sequence_ids"}
    assert NOTE not in answer.headers
    assert (await api.http.get("/statusz")).json()["samples"]["max_tokens_cut"] == 0


async def test_the_server_remembers_a_limited_number_of_told_sessions(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_REMEMBERED", 1)
    first, second = await api.sampler(), await api.sampler()
    has_note = [
        NOTE in (await sample(api, sampler, i, 1000)).headers for i, sampler in enumerate([first, first, second, first])
    ]
    assert has_note == [True, False, True, True]


async def test_the_sdk_accepts_a_promise_with_an_extra_field() -> None:
    """The server's promise has one field more than the SDK knows."""
    promise = {"request_id": "r", "sample_sequence_ids": ["a"], "max_tokens": 97}
    assert tinker.types.UntypedAPIFuture.model_validate(promise).request_id == "r"
