"""Chat completions go to OpenAI's client as they are."""

from __future__ import annotations

import httpx2
import pytest
from chat_answers import Piece, Told
from openai import APIError, OpenAI

from skyrl.chat.dialects.dialect import ChatEncoder
from skyrl.chat.openai.errors import OpenAIError

ANSWER = Told("", "ok", (), (Piece("content", "o"), Piece("content", "k")), "stop")


def texts(stream: bytes) -> list[str]:
    """The pieces of text that OpenAI's client reads."""
    headers = {"content-type": "text/event-stream"}
    answer = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=stream))
    client = OpenAI(api_key="key", base_url="http://server/v1", http_client=httpx2.Client(transport=answer))
    chunks = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True)
    return [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]


def test_an_answer_is_unchanged_and_chunks_are_framed() -> None:
    encoder = ChatEncoder()
    assert encoder.whole(ANSWER.whole()) == ANSWER.whole()
    stream = b"".join(encoder.events(chunk) for chunk in ANSWER.chunks()) + encoder.end()
    assert texts(stream) == ["", "o", "k", ""]
    assert stream.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_fails_ends_with_openais_error() -> None:
    encoder = ChatEncoder()
    failed = encoder.failed(OpenAIError("away", status=503, code="inference_failed"))
    with pytest.raises(APIError, match="away") as error:
        texts(encoder.events(ANSWER.chunks()[1]) + failed)
    assert error.value.code == "inference_failed"
