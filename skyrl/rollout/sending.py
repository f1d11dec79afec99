"""Sends one request until it has an answer: which failures are sent again, how long after, and which are raised.

- A refused connection and 503: no worker has the request. It is sent again until the caller's deadline.
- A broken connection and 502 `worker_interrupted`: a worker may have sampled already. Sent again by default: a rollout
  loses nothing but time by sampling anew, and with a seed the second sample is the first one's.
- Every other status is raised at once with the server's words, and so is an answer that is not HTTP.

Knows neither samples nor groups.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.http import connection
from skyrl.http.answers import header_of
from skyrl.http.client import HttpClient
from skyrl.rollout.errors import BadAnswer, Interrupted, RequestRefused

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
SHORTEST_PAUSE_S = 0.02
INTERRUPTED = "worker_interrupted"
LONGEST_WAIT_S = 60.0
"""The longest Retry-After that is heeded."""
CONNECT_S = 10.0
MOST_BYTES = 2**40
"""An answer may have any size: routed experts of a long sample have hundreds of megabytes."""


@dataclass
class Counters:
    """What the client has done so far. `running` is what it has at the router now."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    unavailable: int = 0
    interrupted: int = 0
    aborted: int = 0
    continued: int = 0
    running: int = 0


class Sender:
    """Counts what becomes of its requests in `counters`."""

    def __init__(
        self, client: HttpClient, headers: dict[str, str], counters: Counters, *, retry_interrupted: bool
    ) -> None:
        self._client = client
        self._headers = headers
        self._counters = counters
        self._retry_interrupted = retry_interrupted

    async def post(self, url: str, body: Any, headers: dict[str, str], failures: list[str], stop: asyncio.Event) -> Any:
        """The JSON of a 200 answer. None if `stop` was set while the request waited to be sent again. The last of
        `failures` is the newest one. Raises RequestRefused, BadAnswer and Interrupted."""
        pause_s = FIRST_PAUSE_S
        content = msgspec.json.encode(body)
        sent = {"content-type": "application/json", **self._headers}
        sent |= {name: value.encode().decode("latin-1") for name, value in headers.items()}  # as UTF-8
        while True:
            after_s: float | None = None
            self._counters.sent += 1
            try:
                answer = await self._client.post(url, content, sent, math.inf, MOST_BYTES)
            except connection.NotAccepted as error:
                self._counters.unavailable += 1
                failures[:] = [str(error)]
            except connection.Interrupted as error:
                if str(error).startswith((connection.NOT_HTTP, connection.HEAD_TOO_LONG)):
                    self._counters.refused += 1
                    raise BadAnswer(f"no router's answer over HTTP: {error}") from error
                self._counters.interrupted += 1
                if not self._retry_interrupted:
                    raise Interrupted(f"the connection broke: {error}") from error
                failures[:] = [f"the connection broke: {error}"]
            else:
                status, text, retry_after = answer.status, answer.body, header_of(answer.headers, b"retry-after")
                if status == 200:
                    self._counters.answered += 1
                    return parsed(text)
                message, code = error_of(text)
                if status == 503:
                    self._counters.unavailable += 1
                    after_s = seconds(retry_after)
                elif status == 502 and code == INTERRUPTED:
                    self._counters.interrupted += 1
                    if not self._retry_interrupted:
                        raise RequestRefused(status, message)
                else:
                    self._counters.refused += 1
                    raise RequestRefused(status, message)
                failures[:] = [f"HTTP {status}: {message}"]
            if await _set_within(stop, pause_s * random.uniform(0.5, 1) if after_s is None else after_s):
                return None
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)


def parsed(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"the answer is not JSON: {error}") from error


def error_of(text: bytes) -> tuple[str, str | None]:
    """The message and the code, in the forms in which SGLang, vLLM and routers write them."""
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return text.decode(errors="replace")[:2000], None
    if not isinstance(body, dict):
        return str(body), None
    error = body.get("error", body.get("detail", body.get("message", body)))
    if isinstance(error, dict):
        code = error.get("code")
        return str(error.get("message", error)), code if isinstance(code, str) else None
    return str(error), None


def seconds(retry_after: str | None) -> float | None:
    """The seconds of a Retry-After header, within bounds; None for a date and for what is no number."""
    try:
        value = float(retry_after or "")
    except ValueError:
        return None
    return min(LONGEST_WAIT_S, max(SHORTEST_PAUSE_S, value)) if value >= 0 else None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
