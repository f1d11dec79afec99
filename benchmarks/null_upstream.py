"""A completions server in vLLM's shape that does no work, so that a server in front of it is measured alone.

POST /v1/completions, or /generate, answers `max_tokens` tokens with logprobs for each of `n` choices, with all fields
of vLLM; bodies are built once per shape. POST /inference/v1/generate answers a prompt with pictures of the tiny model
that sees, each of PICTURE_TOKENS tokens. POST /control?delay_ms=200 sets the delay of later answers.
POST /control?release sends all delayed answers at once. Both answer with the number of requests so far. Every other
path answers {}.
Usage: python -m benchmarks.null_upstream PORT
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any, cast

import uvloop

from benchmarks import prompts

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_CHOICES = re.compile(rb'"n": *(\d+)')
_MAX_TOKENS = re.compile(rb'"max_(?:new_)?tokens": *(\d+)')
_PROMPT = re.compile(rb'"prompt": *\[(\d+)')
_TOKEN_IDS = re.compile(rb'"token_ids": *(\[[\d, ]*\])')
_DELAY = re.compile(rb"delay_ms=([0-9.]+)")
MOST_TOKENS = 1_000_000
IMAGE_TOKEN, PICTURE_TOKENS = 514, 64


def http_answer(body: bytes) -> bytes:
    """A complete HTTP answer 200 with this JSON."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


def _choice(index: int, tokens: list[int]) -> dict[str, Any]:
    texts = [f" w{token}" for token in tokens]
    logprobs = [-(0.1 + (position % 17) / 7) for position in range(len(tokens))]
    return {
        "index": index,
        "text": "".join(texts),
        "logprobs": {
            "text_offset": list(range(0, 5 * len(tokens), 5)),
            "token_logprobs": logprobs,
            "tokens": texts,
            "top_logprobs": [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": tokens,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def completion(choices: int, max_tokens: int, variant: int) -> bytes:
    """A complete HTTP answer."""
    tokens = prompts.answer(variant, max_tokens)
    sampled = choices * max_tokens
    body = {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 1,
        "model": "null",
        "choices": [_choice(index, tokens) for index in range(choices)],
        "usage": {"prompt_tokens": 512, "total_tokens": 512 + sampled, "completion_tokens": sampled},
    }
    return http_answer(json.dumps(body, separators=(",", ":")).encode())


def generation(body: bytes) -> bytes:
    """A complete HTTP answer to a request with pictures."""
    asked, max_tokens = _TOKEN_IDS.search(body), _MAX_TOKENS.search(body)
    given: list[int] = json.loads(asked[1]) if asked else []
    prompt = [each for token in given for each in [token] * (PICTURE_TOKENS if token == IMAGE_TOKEN else 1)]
    tokens = prompts.answer(0, int(max_tokens[1]) if max_tokens else 16)
    content = [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in tokens]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "length"}
    usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(tokens), "completion_tokens": len(tokens)}
    return http_answer(json.dumps({"prompt_token_ids": prompt, "choices": [choice], "usage": usage}).encode())


class Upstream:
    """The state that all connections share. `waiting` holds the answers whose delay has not passed."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.requests = 0
        self.waiting: dict[int, tuple[asyncio.TimerHandle, asyncio.Transport, bytes]] = {}
        self._answers: dict[tuple[int, int, int], bytes] = {}

    def answer(self, body: bytes) -> bytes:
        choices, max_tokens, first = _CHOICES.search(body), _MAX_TOKENS.search(body), _PROMPT.search(body)
        shape = (
            int(choices[1]) if choices else 1,
            int(max_tokens[1]) if max_tokens else 16,
            prompts.variant(int(first[1])) if first else 0,
        )
        answer = self._answers.get(shape)
        if answer is None:
            if shape[0] * shape[1] > MOST_TOKENS:
                return http_answer(b'{"error":{"message":"too many tokens"}}').replace(b"200 OK", b"400 Bad Request", 1)
            answer = self._answers[shape] = completion(*shape)
        return answer

    def control(self, path: bytes) -> bytes:
        if delay := _DELAY.search(path):
            self.delay_s = float(delay[1]) / 1e3
        if b"release" in path:
            for handle, transport, answer in self.waiting.values():
                handle.cancel()
                if not transport.is_closing():
                    transport.write(answer)
            self.waiting.clear()
        return http_answer(b'{"requests":%d,"waiting":%d}' % (self.requests, len(self.waiting)))

    def reply(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        if not path.startswith((b"/v1/completions", b"/generate", b"/inference")):
            transport.write(self.control(path) if path.startswith(b"/control") else http_answer(b"{}"))
            return
        self.requests += 1
        answer = generation(body) if path.startswith(b"/inference") else self.answer(body)
        if self.delay_s <= 0:
            transport.write(answer)
            return
        timer = asyncio.get_running_loop().call_later(self.delay_s, self.send_delayed, self.requests)
        self.waiting[self.requests] = (timer, transport, answer)

    def send_delayed(self, request: int) -> None:
        """The delay of this request has passed."""
        _, transport, answer = self.waiting.pop(request)
        if not transport.is_closing():  # the client may have gone
            transport.write(answer)


class Requests(asyncio.Protocol):
    """One connection."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < end:
                return
            line = self._buffer[: self._buffer.find(b"\r\n")].split(b" ", 2)
            if len(line) < 3:  # sglang-router asks whether the server speaks HTTP/2
                self._transport.close()
                return
            path = line[1]
            body, self._buffer = self._buffer[head + 4 : end], self._buffer[end:]
            self._upstream.reply(self._transport, path, body)


async def serve(port: int, upstream: Upstream) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Requests(upstream), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Upstream()))
