"""A vLLM that answers chats on a real socket, for tests of agents' turns. Each sampled token has its own logprob."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fake_upstream import FakeUpstream, Received, reply

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
SAMPLED = 3
"""Tokens of each answer."""
FIRST, MANY = 100, 100
"""The ids that are sampled are MANY from FIRST on, and the one that ends an answer."""
CHARACTERS = 40
"""Of a rendered prompt that make one token."""


@dataclass(frozen=True)
class Sampled:
    """An answer. `logprobs` are in the order of `ids`."""

    ids: list[int]
    logprobs: list[float]


@dataclass
class ChattingUpstream:
    """`end` is the id of the token that ends an answer."""

    upstream: FakeUpstream
    end: int
    answers: list[Sampled] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """The ids of the prompt of the last answer."""
    was_given: bool = False
    """Whether the request had the ids of that prompt, in place of messages."""

    def __post_init__(self) -> None:
        self.upstream.controls[CHAT] = self._chat
        self.upstream.controls[TOKENIZE] = self._count

    async def _count(self, request: Received, writer: asyncio.StreamWriter) -> None:
        await reply(200, {"count": len(_rendered(request.json))})(request, writer)

    async def _chat(self, request: Received, writer: asyncio.StreamWriter) -> None:
        asked = request.json
        given = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids")
        self.prompt, self.was_given = (_rendered(asked), False) if given is None else (given, True)
        number, length = len(self.answers), len(self.prompt)
        ids = [*(FIRST + (number + place) % MANY for place in range(SAMPLED - 1)), self.end]
        sampled = Sampled(ids, [-(SAMPLED * number + place + 1) / 1024 for place in range(SAMPLED)])
        self.answers.append(sampled)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": f"Answer {number}."},
            "logprobs": {"content": [_logprob(*pair) for pair in zip(ids, sampled.logprobs, strict=True)]},
            "finish_reason": "stop",
        }
        body: dict[str, Any] = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 1,
            "model": asked["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": length, "completion_tokens": SAMPLED, "total_tokens": length + SAMPLED},
        }
        if asked.get("return_token_ids"):
            body["prompt_token_ids"] = self.prompt
        await reply(200, body)(request, writer)


def _rendered(asked: dict[str, Any]) -> list[int]:
    text = str([asked.get("tools"), asked["messages"]])
    return [1] * (len(text) // CHARACTERS + 1)


def _logprob(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": [], "top_logprobs": []}
