"""A context that is full, on the real vLLM: one rule in all dialects. The tiny model takes 4,096 tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from skyrl.cli.demo.server import DemoServer

pytestmark = pytest.mark.vllm

CONTEXT = 4096
KEY = {"Authorization": "Bearer tml-full"}


class Full:
    def __init__(self, server: DemoServer) -> None:
        self.http = httpx.Client(base_url=server.url, headers=KEY, timeout=120, trust_env=False)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json={"model": "tiny"} | fields)

    def text_of(self, tokens: int) -> str:
        """A message with which a chat's prompt has exactly so many tokens. Each x after the first is one."""
        short = self._count("x")
        text = "x" * (tokens - short + 1)
        while (count := self._count(text)) != tokens:
            text = text[: tokens - count] if count > tokens else text + "x" * (tokens - count)
        return text

    def _count(self, text: str) -> int:
        asked = {"messages": [{"role": "user", "content": text}]}
        return self.post("/v1/messages/count_tokens", **asked).json()["input_tokens"]


@pytest.fixture(scope="module")
def full(server: DemoServer) -> Full:
    return Full(server)


@pytest.mark.parametrize("max_tokens", [1, 5, 5000, None])
def test_a_prompt_that_fills_the_context_is_told_as_such_by_every_route(full: Full, max_tokens: int | None) -> None:
    text = full.text_of(CONTEXT)
    chat = {"messages": [{"role": "user", "content": text}]}
    asked = {} if max_tokens is None else {"max_tokens": max_tokens}
    for path, fields in (
        ("/v1/completions", {"prompt": [5] * CONTEXT} | asked),
        ("/v1/completions", {"prompt": "x " * CONTEXT} | asked),
        ("/v1/chat/completions", chat | asked),
        ("/v1/responses", {"input": text} | ({} if max_tokens is None else {"max_output_tokens": max_tokens})),
        ("/inference/v1/generate", {"token_ids": [5] * CONTEXT, "sampling_params": asked}),
    ):
        answer = full.post(path, **fields)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["code"] == "context_length_exceeded", (path, answer.text)
    answer = full.post("/v1/messages", **chat, max_tokens=max_tokens or 1)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long")


def test_max_tokens_above_what_fits_is_cut_by_every_route(full: Full) -> None:
    text = full.text_of(CONTEXT - 2)
    chat = {"messages": [{"role": "user", "content": text}]}
    forever = {"logit_bias": {"7": 100}}
    for wanted in (5, 5000):
        for path, fields, reason in (
            ("/v1/completions", {"prompt": [5] * (CONTEXT - 2), "max_tokens": wanted} | forever, "length"),
            ("/v1/chat/completions", chat | {"max_tokens": wanted} | forever, "length"),
            ("/v1/chat/completions", chat | {"max_completion_tokens": wanted} | forever, "length"),
        ):
            answer = full.post(path, **fields)
            assert answer.status_code == 200, (path, answer.text)
            assert answer.json()["usage"]["completion_tokens"] == 2
            assert answer.json()["choices"][0]["finish_reason"] == reason
        params = {"max_tokens": wanted} | forever
        answer = full.post("/inference/v1/generate", token_ids=[5] * (CONTEXT - 2), sampling_params=params)
        assert answer.json()["usage"]["completion_tokens"] == 2
        answer = full.post("/v1/messages", **chat, max_tokens=wanted)
        assert answer.status_code == 200
        assert answer.json()["usage"]["output_tokens"] <= 2
        answer = full.post("/v1/responses", input=text, max_output_tokens=wanted)
        assert answer.status_code == 200
        assert answer.json()["usage"]["output_tokens"] <= 2
