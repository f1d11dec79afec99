"""Endpoints that skip the framework's routing answer as they would have through it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.app import Application
from skyrl.api.reply import reply
from skyrl.wire.errors import NotFound, RequestError


class Odd(NotFound):
    """An error without a handler of its own."""


def application(*, direct: bool) -> Application:
    app = Application()
    app.state.word = "state"

    @app.post("/plain")
    async def plain(request: Request) -> Response:
        body = await request.body()
        return reply({"body": body.decode(), "query": request.url.query, "state": request.app.state.word}, 201)

    @app.post("/refused")
    async def refused(request: Request) -> Response:
        raise Odd("not here", field=(await request.body()).decode())

    @app.post("/http")
    async def http(request: Request) -> Response:
        raise HTTPException(418, "teapot", {"X-Tea": "green"})

    @app.post("/broken")
    async def broken(request: Request) -> Response:
        raise ZeroDivisionError

    @app.post("/typed")
    async def typed(request: Request, number: int) -> Response:
        return reply(number)

    @app.exception_handler(RequestError)
    async def on_refusal(_: Request, error: RequestError) -> Response:
        return reply(error.message, error.status)

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> Response:
        return reply(error.detail, error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def on_any(request: Request, error: Exception) -> Response:
        return reply(f"{request.url.path}: {type(error).__name__}", 500)

    if direct:
        app.route_directly()
    return app


@pytest.fixture
async def both() -> AsyncIterator[list[httpx.AsyncClient]]:
    clients = [
        httpx.AsyncClient(
            transport=httpx.ASGITransport(application(direct=direct), raise_app_exceptions=False), base_url="http://api"
        )
        for direct in (True, False)
    ]
    yield clients
    for client in clients:
        await client.aclose()


def test_only_what_takes_nothing_but_the_request_is_called_directly() -> None:
    app = application(direct=True)
    assert set(app._direct) == {"/plain", "/refused", "/http", "/broken"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/plain", 201),
        ("POST", "/plain?a=b", 201),
        ("POST", "/refused", 404),
        ("POST", "/http", 418),
        ("POST", "/broken", 500),
        ("POST", "/typed?number=3", 200),
        ("POST", "/typed?number=x", 422),
        ("GET", "/plain", 405),
        ("POST", "/plain/", 307),
        ("POST", "/nowhere", 404),
    ],
)
async def test_answers_are_the_same(both: list[httpx.AsyncClient], method: str, path: str, status: int) -> None:
    answers: list[Any] = []
    for client in both:
        answer = await client.request(method, path, content=b"text")
        answers.append((answer.status_code, answer.content, dict(answer.headers)))
    assert answers[0] == answers[1]
    assert answers[0][0] == status
