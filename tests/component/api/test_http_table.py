"""The HTTP table: every request passes through each hook, and routes that it calls directly answer as those that it
finds through FastAPI."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from api_harness import Api, Serve
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from starlette.exceptions import HTTPException
from starlette.requests import Request

from skyrl.api.app import create_app
from skyrl.api.call import Body, Call, Hook, Route
from skyrl.api.table import MAX_REQUEST_ID, HttpTable, RequestIds
from skyrl.base.wire.errors import InvalidToken, NotFound, OverQuota, RequestError
from skyrl.runtime.processes.logs import LineFormat
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.db import keys as key_rows
from skyrl.storage.db.database import Database

KEY = {"X-API-Key": "tml-one"}
NAMES = {
    "session_id": "s",
    "sampler_id": "x",
    "model_id": "m",
    "run_id": "m",
    "agent_session": "s",
    "agent_turn": "t",
    "upload_id": "u",
    "kind": "weights",
    "name": "n",
    "save": "0",
    "file": "f",
    "model": "acme/base",
}
OTHERS = (
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("POST", "/api/v1/nowhere"),
    ("GET", "/api/v1/asample"),
    ("DELETE", "/api/v1/sessions/s/finish"),
    ("POST", "/api/v1/asample/"),
    ("OPTIONS", "/"),
    ("HEAD", "/readyz"),
)
"""Requests that no route is declared for."""


class RecordingHook(Hook):
    """A hook that records each call and passes it to the real hook."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.name = hook.name
        self.begun: list[str] = []
        self.ended: list[tuple[str, int | None]] = []

    async def begin(self, call: Call) -> None:
        self.begun.append(call.request.headers["x-request-id"])
        if (waiting := self._hook.begin(call)) is not None:
            await waiting

    def end(self, call: Call) -> None:
        self.ended.append((call.request.headers["x-request-id"], call.status))
        self._hook.end(call)


@dataclass
class RaisingHook(Hook):
    """A hook that raises at the stage `at`."""

    at: str
    name: str = "broken"
    ended: list[int | None] = field(default_factory=list)

    async def begin(self, call: Call) -> None:
        if self.at == "begin":
            raise ZeroDivisionError("secret")

    def end(self, call: Call) -> None:
        self.ended.append(call.status)
        if self.at == "end":
            raise ZeroDivisionError("secret")


@pytest.fixture
def app(api: Api) -> HttpTable:
    return create_app(api.services)


@pytest.fixture
async def client(app: HttpTable) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=KEY) as http:
        yield http


def url_of(api: Api, route: Route) -> str:
    """A path of the route. A signed route gets a signature, so that no hook refuses the request."""
    path = route.path.format(**NAMES)
    if route.scope != "signed":
        return path
    request = Request(
        {"type": "http", "headers": [(b"host", b"api")], "scheme": "http", "path": "/", "query_string": b""}
    )
    return api.services.urls.sign(request, path, 60).url


async def test_each_hook_sees_each_request(api: Api, app: HttpTable, client: httpx.AsyncClient) -> None:
    app.hooks = spies = tuple(RecordingHook(hook) for hook in app.hooks)
    assert [spy.name for spy in spies] == ["metrics", "request id", "access", "body memory"]
    requests = [(route.method, url_of(api, route)) for route in app.routes] + [*OTHERS]
    assert len(requests) > 60
    answers = [
        (f"r{number}", (await client.request(method, url, headers={"X-Request-Id": f"r{number}"})).status_code)
        for number, (method, url) in enumerate(requests)
    ]
    assert {status for _, status in answers} >= {200, 307, 400, 403, 404, 405}
    for spy in spies:
        assert spy.begun == [request_id for request_id, _ in answers], spy.name
        assert spy.ended == answers, spy.name


async def test_each_answer_names_its_request(api: Api, app: HttpTable, client: httpx.AsyncClient) -> None:
    requests = [(route.method, url_of(api, route)) for route in app.routes] + [*OTHERS]
    given = [(await client.request(method, url)).headers["x-request-id"] for method, url in requests]
    assert len(set(given)) == len(requests)
    for method, url in requests:
        headers = {"X-API-Key": "", "X-Request-Id": "mine"}
        assert (await client.request(method, url, headers=headers)).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("given", [b"a b", b"\xff", b"", b"x" * (MAX_REQUEST_ID + 1), b"a\tb"])
async def test_an_invalid_request_id_is_replaced(client: httpx.AsyncClient, given: bytes) -> None:
    answer = await client.get("/", headers=[(b"x-request-id", given)])
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].encode() != given
    assert answer.headers["x-request-id"].isascii()


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("at", ["begin", "end"])
async def test_a_hook_that_raises_gives_a_500_and_the_other_hooks_end(
    app: HttpTable, client: httpx.AsyncClient, at: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other hooks still run their end, because they may hold resources."""
    broken = RaisingHook(at)
    spies = [RecordingHook(hook) for hook in app.hooks]
    app.hooks = (broken, *spies) if where == "first" else (*spies, broken)
    client.headers["X-Request-Id"] = "r"
    for method, url in (("POST", "/api/v1/create_session"), ("GET", "/api/v1/sessions/s"), ("GET", "/nowhere")):
        answer = await client.request(method, url, json={})
        assert answer.status_code == 500, url
        request_id = "-" if (at, where) == ("begin", "first") else "r"
        assert answer.json() == {
            "detail": "internal error: ZeroDivisionError",
            "field": None,
            "request_id": request_id,
        }
    assert "ZeroDivisionError: secret" in caplog.text
    assert len(broken.ended) == 3
    assert [len(spy.ended) for spy in spies] == [3, 3, 3, 3]


async def test_hooks_end_when_the_client_has_disconnected(app: HttpTable) -> None:
    """A disconnected client gets no answer."""
    spies = [RecordingHook(hook) for hook in app.hooks]
    app.hooks = (*spies,)

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        raise ConnectionResetError

    headers = [(b"x-api-key", b"tml-one"), (b"content-length", b"100000"), (b"x-request-id", b"r")]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/asample", "headers": headers, "query_string": b""}
    with pytest.raises(ConnectionResetError):
        await app(scope, receive, send)
    assert [len(spy.ended) for spy in spies] == [1, 1, 1, 1]


async def test_log_lines_of_refused_and_failed_requests_contain_the_request_id(
    api: Api, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "skyrl.api")
    monkeypatch.setattr(caplog.handler, "formatter", LineFormat())

    async def fail(*_: object, **__: object) -> None:
        raise OSError("the disk")

    monkeypatch.setattr(api.services.sessions, "create", fail)
    await client.get("/nowhere", headers={"X-Request-Id": "lost-1"})
    await client.post("/api/v1/create_session", json={}, headers={"X-Request-Id": "broken-2"})
    await client.post("/api/v1/create_session", json=[], headers={"X-Request-Id": "odd-3"})
    lines = caplog.text.splitlines()
    for request_id, beginning in (
        ("lost-1", "refused GET /nowhere"),
        ("broken-2", "POST /api/v1/create_session failed"),
        ("odd-3", "refused POST /api/v1/create_session"),
    ):
        assert [beginning in line for line in lines if line.endswith(f" [request {request_id}]")] == [True], caplog.text


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


@pytest.fixture
async def app_client(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(api.services))
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers={"X-API-Key": "tml-one"}) as http:
        yield http


def paths_of(app: HttpTable, *, direct: bool) -> list[str]:
    """Of the routes with a body that are called directly, or through FastAPI; with a parameter's name as its value."""
    return sorted(
        route.path.replace("{", "").replace("}", "")
        for route in app.routes
        if route.body is not None and route.method == "POST" and route.is_direct is direct
    )


def test_no_route_hides_another(api: Api) -> None:
    """A route without parameters comes first, then the first that was declared of those that fit."""
    app = create_app(api.services)
    for route in app.routes:
        scope = {"type": "http", "method": route.method, "path": re.sub("{.*?}", "a", route.path), "headers": []}
        assert app.find(scope)[0] is route
    assert {route for route in app.routes if route.is_direct} == {*app.direct.values()}


async def test_a_route_is_found_and_guarded_however_its_path_is_spelled(
    app_client: httpx.AsyncClient, api: Api
) -> None:
    """Starlette's patterns also take a path with a line feed at its end."""
    for path in paths_of(create_app(api.services), direct=True):
        for spelled in (path, f"{path}%0A"):
            answer = await app_client.post(spelled, content=b"[]", headers={"X-API-Key": ""})
            assert answer.status_code == 401, spelled
            assert (await app_client.post(spelled, content=b"[]")).status_code == 400, spelled


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
@pytest.mark.parametrize("direct", [True, False])
async def test_both_ways_refuse_the_same_requests(
    api: Api, app_client: httpx.AsyncClient, request_: dict[str, Any], status: int, direct: bool
) -> None:
    for path in paths_of(create_app(api.services), direct=direct):
        assert (await app_client.post(path, **request_)).status_code == status, path


async def test_other_methods_and_path_spellings_are_answered_as_by_fastapi(
    api: Api, app_client: httpx.AsyncClient
) -> None:
    for path in paths_of(create_app(api.services), direct=True):
        # The first is the path of a session whose id is "search", the second that of a list.
        found = {"sessions/search": 404, "v1/agent_sessions": 200}.get("/".join(path.rsplit("/", 2)[1:]), 405)
        answer = await app_client.get(path)
        assert answer.status_code == found, path
        assert answer.headers.get("allow") == ("POST" if found == 405 else None), path
        assert (await app_client.post(f"{path}/", content=b"{}")).status_code == 307, path
        assert (await app_client.post(f"/{path}", content=b"{}")).status_code == 404, path


@pytest.mark.parametrize("name", ERRORS)
async def test_both_ways_turn_errors_into_the_same_answers(
    api: Api, app_client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The error is raised by the last step before the handlers, then by the first hook."""
    error, status = ERRORS[name]

    def fail(_: Body, content: bytes) -> None:
        raise error

    async def fail_at_once(_: RequestIds, call: Call) -> None:
        raise error

    app = create_app(api.services)
    for place, failing in (((Body, "decoded"), fail), ((RequestIds, "begin"), fail_at_once)):
        with monkeypatch.context() as patch:
            patch.setattr(*place, failing)
            for path in paths_of(app, direct=True) + paths_of(app, direct=False):
                assert (await app_client.post(path, content=b"{}")).status_code == status, path


def test_the_test_above_covers_every_kind_of_error(api: Api) -> None:
    kinds = create_app(api.services)._errors.kinds
    assert {next(kind for kind in type(error).__mro__ if kind in kinds) for error, _ in ERRORS.values()} == {*kinds}


async def test_the_document_has_each_field_of_a_refusal(api: Api) -> None:
    refused = await api.post("asample", {})
    document = (await api.http.get("/openapi.json")).json()
    assert document["components"]["schemas"]["Refusal"]["properties"].keys() == refused.json().keys()


async def test_a_key_without_the_scope_is_refused(serve: Serve, database: Database) -> None:
    text, _ = database.write(lambda c: key_rows.create(c, tenant=None, name="k", scopes=("sample",), expires_at=None))
    async with serve(api_keys="managed") as api:
        refused = [
            path
            for path in paths_of(create_app(api.services), direct=True)
            if (await api.http.post(path, content=b"[]", headers={"X-API-Key": text})).status_code == 403
        ]
    assert "/api/v1/forward_backward" in refused
    assert "/api/v1/asample" not in refused
