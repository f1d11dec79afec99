"""A vLLM that answers chats on a real socket, for tests of agents' turns. Each sampled token has its own logprob."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from fake_upstream import FakeUpstream, Received, reply
from tokenizers import Tokenizer

from skyrl.chat.agents.rendering.loaded_models import renderer_of
from skyrl.chat.agents.rendering.renderer import Setting

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
SAMPLED = 3
"""Tokens of each answer."""
FIRST, MANY = 100, 100
"""The ids that are sampled are MANY from FIRST on, and the one that ends an answer."""
CHARACTERS, END = 40, 100
"""Of a rendered prompt: so many make one token, and the last ones are those of the template."""


@dataclass(frozen=True)
class Sampled:
    """An answer. `logprobs` are in the order of `ids`, and so are `marks`, if the server has skyrl's plugin."""

    ids: list[int]
    logprobs: list[float]
    marks: list[bool] | None = None

    def shown(self, start: int, stop: int) -> dict[str, Any]:
        """The logprobs of these tokens in vLLM's form."""
        pairs = zip(self.ids[start:stop], self.logprobs[start:stop], strict=True)
        named: list[dict[str, Any]] = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        for each, mark in zip(named, (self.marks or [])[start:stop], strict=False):
            each["constrained"] = mark
        return {"content": [each | {"bytes": [], "top_logprobs": []} for each in named]}


@dataclass
class ChattingUpstream:
    """`end` is the id of the token that ends an answer. Prompts end as the template of `model`, a directory, ends
    them."""

    upstream: FakeUpstream
    end: int
    model: str
    answers: list[Sampled] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """The ids of the prompt of the last answer."""
    was_given: bool = False
    """Whether the request had the ids of that prompt, in place of messages."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """A stream waits for this after its first token, and a whole answer before it is sent. It is set at first."""
    marks: list[bool] | None = None
    """Which tokens of each answer a grammar narrows, as skyrl's plugin tells it; None: a vLLM without the plugin."""

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(f"{self.model}/tokenizer.json")
        self._renderer = renderer_of(self.model)
        self.go_on.set()
        self.upstream.controls[CHAT] = self._chat
        self.upstream.controls[TOKENIZE] = self._count

    def _rendered(self, asked: dict[str, Any]) -> list[int]:
        assert self._renderer is not None
        text = self._renderer.render(asked["messages"], Setting.of(asked, at=0.0))
        end = self._tokenizer.encode(text[-END:], add_special_tokens=False).ids
        return [1] * (len(str([asked.get("tools"), asked["messages"]])) // CHARACTERS + 1) + end

    async def _count(self, request: Received, writer: asyncio.StreamWriter) -> None:
        await reply(200, {"count": len(self._rendered(request.json))})(request, writer)

    async def _chat(self, request: Received, writer: asyncio.StreamWriter) -> None:
        asked = request.json
        given = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids")
        self.prompt, self.was_given = (self._rendered(asked), False) if given is None else (given, True)
        number, length = len(self.answers), len(self.prompt)
        ids = [*(FIRST + (number + place) % MANY for place in range(SAMPLED - 1)), self.end]
        sampled = Sampled(ids, [-(SAMPLED * number + place + 1) / 1024 for place in range(SAMPLED)], self.marks)
        self.answers.append(sampled)
        head: dict[str, Any] = {"id": f"chatcmpl-{number}", "created": 1, "model": asked["model"]}
        if asked.get("return_token_ids"):
            head["prompt_token_ids"] = self.prompt
        text = f"Answer {number}."
        if asked.get("stream"):
            await self._stream(writer, head, sampled, text, length)
            return
        await self.go_on.wait()
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        choice["logprobs"] = sampled.shown(0, SAMPLED)
        body = {"object": "chat.completion", "choices": [choice], "usage": _usage(length, SAMPLED)}
        await reply(200, head | body)(request, writer)

    async def _stream(
        self, writer: asyncio.StreamWriter, head: dict[str, Any], sampled: Sampled, text: str, length: int
    ) -> None:
        """The first token with half of the text; later the other tokens with the rest."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        head |= {"object": "chat.completion.chunk"}
        half = len(text) // 2
        for content, start, stop, ends in ((text[:half], 0, 1, None), (text[half:], 1, SAMPLED, "stop")):
            choice = {"index": 0, "delta": {"role": "assistant", "content": content}, "finish_reason": ends}
            choice["logprobs"] = sampled.shown(start, stop)
            chunk = head | {"choices": [choice], "usage": _usage(length, stop)}
            writer.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await writer.drain()
            await self.go_on.wait()
        total = head | {"choices": [], "usage": _usage(length, SAMPLED)}
        writer.write(f"data: {json.dumps(total)}\n\ndata: [DONE]\n\n".encode())
        await writer.drain()
        writer.close()


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
