"""Requests and answers of an ASGI application that changes some requests on their way to the application behind it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object; none for another body, which the application behind refuses."""
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


async def body_of(receive: Receive, most: int) -> bytes | None:
    """The whole body; None if it has more than `most` bytes. What a client has sent that went away is left to the
    application behind."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body", False):
            return body


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what the server gives."""
    waiting = [body]

    async def again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return again


def with_length(scope: Message, length: int) -> Message:
    """The scope of a request whose body has `length` bytes."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def pass_on(app: App, scope: Message, receive: Receive, send: Send) -> int | None:
    """Pass a request on. The status of its answer; None if there is none."""
    status: int | None = None

    async def noting(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    await app(scope, receive, noting)
    return status


async def answer_json(send: Send, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
