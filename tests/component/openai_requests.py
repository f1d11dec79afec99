"""OpenAI requests of tests, the answers that an upstream gives to them, and what the callers read."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from api_harness import BASE, LONG_S, Api
from fake_upstream import Received, Reply, reply
from sqlalchemy import insert, select

from skyrl.api.access import tenant_of_key
from skyrl.api.app import create_app
from skyrl.api.table import HttpTable
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from skyrl.storage.db.usage import usage

ONE, TWO = tenant_of_key("tml-one"), tenant_of_key("tml-two")
RUN = "s1:train:0"
PATH = f"tinker://{RUN}/sampler_weights/a"
ADAPTER = AdapterVersion.of(RUN, 3)
PROMPT = {"model": BASE, "prompt": [5, 6, 7], "max_tokens": 4}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def save(database: Database, name: str = "a", **changes: Any) -> None:
    row = {
        "tenant": ONE,
        "model_id": RUN,
        "kind": "sampler_weights",
        "name": name,
        "store_key": "k/a",
        "weights": ADAPTER,
        "base_model": BASE,
        "size_bytes": 1,
        "public": False,
        "created_at": 1.0,
    }
    row |= lora_values(LoraSpec(8, 32.0, 1, True, True, True)) | changes
    database.write(lambda c: c.execute(insert(checkpoints), row))


def answer_of(request: Received, finish: str = "stop") -> dict[str, Any]:
    """As vLLM answers: with its own name for the model, and fields that callers must not see."""
    choice = {"index": 0, "text": "hi", "finish_reason": finish}
    own = {"kv_transfer_params": {"host": "secret"}, "metrics": {"x": 1}}
    return {"id": "cmpl-1", "model": request.json["model"], "choices": [choice], "usage": USAGE} | own


async def complete(request: Received, writer: asyncio.StreamWriter) -> None:
    await reply(200, answer_of(request))(request, writer)


def events(
    *data: Any,
    then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None,
    done: bool = True,
    replica: str = "",
) -> Reply:
    """A stream in vLLM's form, whose last events are DONE unless `done` is false; then `then` runs. `replica`: as a
    router names it."""

    async def send(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n")
        writer.write(f"X-Skyrl-Worker: {replica}\r\n\r\n".encode() if replica else b"\r\n")
        for each in data:
            text = json.dumps({"id": "cmpl-1", "model": request.json["model"]} | each if "error" not in each else each)
            writer.write(f"data: {text}\n\n".encode())
        if done:
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        if then is not None:
            await then(writer)
        writer.close()

    return send


def piece(text: str, tokens: int, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


TOTAL = {"choices": [], "usage": USAGE}
DEAD = {"error": {"message": "EngineCore is dead at /some/path", "type": "InternalServerError", "code": 500}}


async def ask(api: Api, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return await api.http.post(path, json=body, headers=headers)


def data_of(answer: httpx.Response) -> list[Any]:
    """The data of the events of a stream."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n")[:-1]]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


def refusal(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    body = answer.json()
    assert body.keys() == {"error"}, body
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return answer.status_code, body["error"]["param"], body["error"]["code"]


def used(database: Database) -> dict[tuple[str, str, str], float]:
    """(tenant, session, kind) → amount."""
    query = select(usage.c.tenant, usage.c.session_id, usage.c.kind, usage.c.amount)
    return {
        (row.tenant, row.session_id, row.kind): row.amount for row in database.read(lambda c: list(c.execute(query)))
    }


async def counted(api: Api, database: Database) -> dict[str, float]:
    await api.usage.flush()
    return {
        kind: amount for (tenant, session, kind), amount in used(database).items() if (tenant, session) == (ONE, "")
    }


class Connection:
    """A request over an ASGI connection, which the client closes when the block ends. It reads `readable` messages."""

    def __init__(
        self, api: Api, body: dict[str, Any], app: HttpTable | None = None, readable: float = math.inf
    ) -> None:
        self._readable = readable
        self.app = app or create_app(api.services)
        self._body = json.dumps(body).encode()
        self._closed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.began = asyncio.Event()

    async def __aenter__(self) -> Connection:
        headers = [(b"x-api-key", b"tml-one"), (b"content-length", str(len(self._body)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        messages = iter([{"type": "http.request", "body": self._body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(messages, None)) is not None:
                return message
            await self._closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)
            if len(self.sent) > self._readable:
                await asyncio.Event().wait()
            if message.get("body"):
                self.began.set()

        self.task = asyncio.create_task(self.app(scope, receive, send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed.set()
        async with asyncio.timeout(LONG_S):
            await self.task
