"""Sends a request until the server has answered it: which failures are sent again, how long after, which are raised.

Refused and broken connections, 429 and 5xx are sent again, with pauses that double. Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import httpx
import msgspec

from skyrl.agents.errors import BadAnswer, RequestRefused, ServerUnavailable

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
CONNECTIONS = 64
"""At once, to the server. Further requests wait for one of them."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding an answer raises."""

T = TypeVar("T")


class _Refusal(msgspec.Struct):
    detail: str


class Requests:
    """Use as an asynchronous context manager. Requests may run at once in one event loop."""

    def __init__(self, base_url: str, api_key: str, patience_s: float) -> None:
        """`patience_s` bounds the time from a request's first failure to its last attempt."""
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"X-API-Key": api_key},
            limits=httpx.Limits(max_connections=CONNECTIONS),
            timeout=httpx.Timeout(60.0, connect=10.0, pool=None),
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def send(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, str | int] | None = None
    ) -> bytes:
        """The body of the answer. Raises RequestRefused and ServerUnavailable."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        pause, deadline = FIRST_PAUSE_S, None
        while True:
            asked = 0.0
            try:
                answer = await self._http.request(method, path, content=content, params=query, headers=headers)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return answer.content
                if answer.status_code < 500 and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                    raise RequestRefused(answer.status_code, _message(answer))
                failure, asked = f"HTTP {answer.status_code}: {_message(answer)}", _retry_after(answer)
            now = time.monotonic()
            deadline = now + self._patience_s if deadline is None else deadline
            wait = max(asked, pause * random.uniform(0.5, 1.0))
            if now + wait > deadline:
                raise ServerUnavailable(f"{method} {path}: no answer within {self._patience_s:g} s; last: {failure}")
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def decoded(kind: type[T], body: bytes) -> T:
    """The JSON of an answer as `kind`. Raises BadAnswer."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise BadAnswer(f"an answer that this client cannot read: {error}") from None


def _message(answer: httpx.Response) -> str:
    """The server's sentence. A proxy before the server may answer with anything."""
    try:
        return msgspec.json.decode(answer.content, type=_Refusal).detail
    except UNREADABLE:
        return answer.text[:500]


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0
