"""Routes that the HTTP table calls directly answer as they do through FastAPI. One API process serves both ways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api, Serve, sample_body, tokens
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl.api.app import HttpTable, create_app
from skyrl.api.call import Call
from skyrl.api.hooks import RequestIds
from skyrl.api.route import Body
from skyrl.base.wire.errors import InvalidToken, NotFound, OverQuota, RequestError
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.db import keys as key_rows
from skyrl.storage.db.database import Database


class ErrorWithoutHandler(NotFound):
    """An error type without its own handler."""


ERRORS = {
    "request": (RequestError("no", field="prompt.chunks", status=418), 418),
    "request, later": (RequestError("not now", status=429, retry_after_s=2.5), 429),
    "quota": (OverQuota("samples", "too many", retry_after_s=7), 429),
    "token": (InvalidToken("it has ended"), 401),
    "subclass": (ErrorWithoutHandler("not here", field="name"), 404),
    "validation": (RequestValidationError([{"loc": ("body", "a", 0), "msg": "is odd", "type": "odd"}]), 400),
    "http": (HTTPException(418, "teapot", {"X-Tea": "green"}), 418),
    "files are gone": (NotStored("gone"), 404),
    "store is away": (StoreError("away"), 503),
    "database is away": (NoConnectionFree("no connection is free"), 503),
    "database is wrong": (SQLAlchemyError("no such table"), 500),
    "any": (ZeroDivisionError("secret"), 500),
}


class PostRecorder:
    """A middleware in FastAPI that records the POST requests which pass through FastAPI."""

    def __init__(self, app: ASGIApp, posts: set[str]) -> None:
        self._app, self._posts = app, posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self._posts.add(scope["path"])
        await self._app(scope, receive, send)


class RecordedApp:
    """An application, its client, and the paths of the POST requests that passed through FastAPI."""

    def __init__(self, app: HttpTable) -> None:
        self.app = app
        self.posts = set[str]()
        app.framework.add_middleware(PostRecorder, posts=self.posts)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://api")


@dataclass
class BothApps:
    """Two applications on the services of one API process."""

    api: Api
    short: RecordedApp
    framework: RecordedApp

    @property
    def whole_paths(self) -> list[str]:
        """Routes with a body and without path parameters."""
        return sorted(route.path for route in self.short.app.routes if route.body is not None and "{" not in route.path)

    async def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send the request to the direct application, then through FastAPI; return the answer. Both answers must be
        equal, with headers."""
        request["headers"] = {"X-API-Key": "tml-one", "X-Request-Id": "same"} | request.get("headers", {})
        for may_differ in (True, False):  # a token names its second, which may end between the two
            answers = [await way.client.request(method, path, **request) for way in (self.short, self.framework)]
            short, framework = ((answer.status_code, answer.content, dict(answer.headers)) for answer in answers)
            if path != "/api/v1/auth/token" or short == framework or not may_differ:
                break
        assert short == framework
        return answers[0]

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.ask("POST", f"/api/v1/{path}", json=body, headers=headers)


@pytest.fixture
async def both(api: Api) -> AsyncIterator[BothApps]:
    async with both_of(api) as both:
        yield both


@asynccontextmanager
async def both_of(api: Api) -> AsyncIterator[BothApps]:
    short, framework = create_app(api.services), create_app(api.services)
    framework.direct.clear()
    both = BothApps(api, RecordedApp(short), RecordedApp(framework))
    async with both.short.client, both.framework.client:
        yield both


async def test_posts_without_path_parameters_are_called_directly(both: BothApps) -> None:
    routes = [route for route in both.short.app.framework.routes if isinstance(route, APIRoute)]
    for path in sorted({route.path for route in routes}):
        await both.ask("POST", path, content=b"[]")
    paths = {route.path for route in routes if "POST" in route.methods}
    assert set(both.whole_paths) < paths < both.framework.posts
    taken_directly = both.framework.posts - both.short.posts
    assert taken_directly == {path for path in paths if "{" not in path}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"headers": {"X-API-Key": ""}}, 401),
        ({"headers": {"X-API-Key": "x" * 3_000}}, 401),
        ({"content": b"{"}, 400),
        ({"content": b"\xff"}, 400),
        ({"content": b"[]"}, 400),
        ({"content": b"[]", "params": {"a": "b"}}, 400),
        ({"content": b"{}", "headers": {"Content-Encoding": "odd"}}, 415),
        ({"content": b"{}", "headers": {"Content-Length": "99999999999"}}, 413),
    ],
    ids=["no key", "long key", "half", "not utf-8", "list", "list, and a query", "encoding", "too large"],
)
async def test_both_ways_refuse_the_same_requests(both: BothApps, request_: dict[str, Any], status: int) -> None:
    for path in both.whole_paths:
        assert (await both.ask("POST", path, **request_)).status_code == status, path


async def test_both_ways_treat_other_methods_and_path_spellings_alike(both: BothApps) -> None:
    for path in both.whole_paths:
        # The first is the path of a session whose id is "search", the second that of a list.
        found = {"search": 404, "agent_sessions": 200}.get(path.rpartition("/")[2], 405)
        assert (await both.ask("GET", path)).status_code == found, path
        assert (await both.ask("POST", f"{path}/", content=b"{}")).status_code == 307, path
        assert (await both.ask("POST", f"/{path}", content=b"{}")).status_code == 404, path


@pytest.mark.parametrize("name", ERRORS)
async def test_both_ways_turn_errors_into_the_same_answers(
    both: BothApps, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The error is raised by the last step before the handlers, then by the first hook."""
    error, status = ERRORS[name]

    def fail(_: Body, content: bytes) -> None:
        raise error

    async def fail_at_once(_: RequestIds, call: Call) -> None:
        raise error

    for place, failing in (((Body, "decoded"), fail), ((RequestIds, "begin"), fail_at_once)):
        with monkeypatch.context() as patch:
            patch.setattr(*place, failing)
            for path in both.whole_paths:
                assert (await both.ask("POST", path, content=b"{}")).status_code == status, path


def test_the_test_above_covers_every_error_handler(both: BothApps) -> None:
    handlers = both.short.app.framework.exception_handlers
    met = {next(kind for kind in type(error).__mro__ if kind in handlers) for error, _ in ERRORS.values()}
    assert met == handlers.keys() - {WebSocketRequestValidationError}


async def test_both_ways_refuse_a_key_without_the_scope(serve: Serve, database: Database) -> None:
    text, _ = database.write(lambda c: key_rows.create(c, tenant=None, name="k", scopes=("sample",), expires_at=None))
    async with serve(api_keys="managed") as api, both_of(api) as both:
        refused = [
            path
            for path in both.whole_paths
            if (await both.ask("POST", path, content=b"[]", headers={"X-API-Key": text})).status_code == 403
        ]
    assert "/api/v1/forward_backward" in refused
    assert "/api/v1/asample" not in refused


async def test_a_sample_repeated_the_other_way_is_the_same_sample(both: BothApps) -> None:
    """Each request carries a number, so the second application returns the result of the first."""
    session = (await both.api.post("create_session", {})).json()["session_id"]
    assert (await both.post("session_heartbeat", {"session_id": session})).status_code == 200
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await both.post("create_sampling_session", wanted)).json()["sampling_session_id"]
    promise = (await both.post("asample", sample_body(sampler, 1))).json()
    sample = {"X-Tinker-Request-Type": "Sample", "Accept": "application/x-protobuf"}
    result = await both.post("retrieve_future", {"request_id": promise["request_id"]}, **sample)
    assert tokens(result) == [[0, 1, 2]]
    model = await both.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE})
    assert model.json()["model_id"].startswith(session)
