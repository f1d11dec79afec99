"""A vLLM-shaped completions server that does no work: what is measured in front of it is the forwarding alone.

Answers POST /v1/completions with `max_tokens` tokens and logprobs for each of `n` choices, built once per shape.
Usage: python benchmarks/null_upstream.py PORT [DELAY_MS]
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_FIELD = {name: re.compile(rb'"%s": *(\d+)' % name.encode()) for name in ("n", "max_tokens")}


def completion(n: int, max_tokens: int) -> bytes:
    """A whole HTTP answer."""
    tokens = [3 + i % 400 for i in range(max_tokens)]
    logprobs = [-0.1 - (i % 17) / 7 for i in range(max_tokens)]
    choices = [
        {
            "index": index,
            "text": "word " * max_tokens,
            "finish_reason": "length",
            "token_ids": tokens,
            "logprobs": {"tokens": ["word "] * max_tokens, "token_logprobs": logprobs, "top_logprobs": None},
        }
        for index in range(n)
    ]
    body = json.dumps({"id": "cmpl-0", "choices": choices, "usage": {"prompt_tokens": 1}}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


class Upstream(asyncio.Protocol):
    answers: dict[tuple[int, int], bytes] = {}
    delay_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            match = _LENGTH.search(self._buffer, 0, head)
            end = head + 4 + (int(match[1]) if match else 0)
            if len(self._buffer) < end:
                return
            body, self._buffer = self._buffer[head + 4 : end], self._buffer[end:]
            shape = tuple(int(m[1]) if (m := _FIELD[name].search(body)) else 1 for name in ("n", "max_tokens"))
            answer = self.answers.setdefault(shape, completion(*shape))  # type: ignore[arg-type]
            asyncio.get_running_loop().call_later(self.delay_s, self._transport.write, answer)


async def main() -> None:
    Upstream.delay_s = float(sys.argv[2]) / 1e3 if len(sys.argv) > 2 else 0.0
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Upstream, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
