"""Sends a request again and again, with a fixed number in flight, and measures. Does not look into answers.

One connection per request in flight, HTTP/1.1, raw bytes: the generator must cost less than what it measures. It reads
an answer up to its Content-Length, or to the end of its chunks. Prints one JSON line.
Usage: python -m benchmarks.router_load URL IN_FLIGHT SECONDS BODY
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.series import quantile

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
WARM_UP_SHARE = 0.2
"""The part of the window before it that is not measured."""


@dataclass
class Load:
    """What all connections share. `answers` counts all of them, also those before and after the window."""

    request: bytes
    measuring: bool = False
    stopping: bool = False
    seconds: list[float] = field(default_factory=list[float])
    errors: int = 0
    answers: int = 0


class Connection(asyncio.Protocol):
    """Sends the next request when the answer to the last one is complete."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = b""
        self._sent_at = 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data if self._buffer else data
        head = buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(buffer, 0, head)
        if length:
            if len(buffer) < head + 4 + int(length[1]):
                return
        elif not buffer.endswith(b"0\r\n\r\n"):
            return
        if self._load.measuring:
            self._load.seconds.append(time.perf_counter() - self._sent_at)
        self._load.answers += 1
        if not buffer.startswith(b"HTTP/1.1 200"):
            self._load.errors += 1
        self._buffer = b""
        if self._load.stopping:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.stopping:
            self._load.errors += 1
        if not self.ended.done():
            self.ended.set_result(None)


def request_of(url: str, body: bytes) -> bytes:
    """A complete HTTP request."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def measure(load: Load, url: str, in_flight: int, seconds: float) -> dict[str, float]:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(lambda: Connection(load), parts.hostname or "", parts.port or 80))[1]
        for _ in range(in_flight)
    ]
    await asyncio.sleep(seconds * WARM_UP_SHARE)
    load.measuring = True
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    load.measuring = False
    wall = time.perf_counter() - began
    load.stopping = True
    await asyncio.wait([connection.ended for connection in connections], timeout=10)
    return {
        "per_s": len(load.seconds) / wall,
        "p50_ms": quantile(load.seconds, 0.5) * 1e3,
        "p99_ms": quantile(load.seconds, 0.99) * 1e3,
        "errors": load.errors,
        "answers": load.answers,
    }


if __name__ == "__main__":
    _, target, in_flight, seconds, body = sys.argv
    load = Load(request_of(target, body.encode()))
    print(json.dumps(uvloop.run(measure(load, target, int(in_flight), float(seconds)))))
