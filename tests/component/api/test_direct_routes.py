"""Routes that the HTTP table calls directly, and those that it finds through FastAPI: refusals and errors have the same
answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_harness import Api, Serve
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from starlette.exceptions import HTTPException

from skyrl.api.app import create_app
from skyrl.api.call import Body, Call
from skyrl.api.table import HttpTable, RequestIds
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


@pytest.fixture
async def client(api: Api) -> AsyncIterator[httpx.AsyncClient]:
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
    """The HTTP table looks for a route without parameters first, FastAPI for the one that was declared first."""
    app = create_app(api.services)
    for method, path in app.direct:
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        assert app.framework.find(scope)[0] is app.direct[method, path]
    assert {route for route in app.routes if not route.is_direct} == {*app.routes} - {*app.direct.values()}


async def test_a_route_is_found_and_guarded_however_its_path_is_spelled(client: httpx.AsyncClient, api: Api) -> None:
    """Starlette's patterns also take a path with a line feed at its end."""
    for path in paths_of(create_app(api.services), direct=True):
        for spelled in (path, f"{path}%0A"):
            answer = await client.post(spelled, content=b"[]", headers={"X-API-Key": ""})
            assert answer.status_code == 401, spelled
            assert (await client.post(spelled, content=b"[]")).status_code == 400, spelled


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
    api: Api, client: httpx.AsyncClient, request_: dict[str, Any], status: int, direct: bool
) -> None:
    for path in paths_of(create_app(api.services), direct=direct):
        assert (await client.post(path, **request_)).status_code == status, path


async def test_other_methods_and_path_spellings_are_answered_as_by_fastapi(api: Api, client: httpx.AsyncClient) -> None:
    for path in paths_of(create_app(api.services), direct=True):
        # The first is the path of a session whose id is "search", the second that of a list.
        found = {"search": 404, "agent_sessions": 200}.get(path.rpartition("/")[2], 405)
        answer = await client.get(path)
        assert answer.status_code == found, path
        assert answer.headers.get("allow") == ("POST" if found == 405 else None), path
        assert (await client.post(f"{path}/", content=b"{}")).status_code == 307, path
        assert (await client.post(f"/{path}", content=b"{}")).status_code == 404, path


@pytest.mark.parametrize("name", ERRORS)
async def test_both_ways_turn_errors_into_the_same_answers(
    api: Api, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, name: str
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
                assert (await client.post(path, content=b"{}")).status_code == status, path


def test_the_test_above_covers_every_kind_of_error(api: Api) -> None:
    kinds = create_app(api.services)._errors.kinds
    assert {next(kind for kind in type(error).__mro__ if kind in kinds) for error, _ in ERRORS.values()} == {*kinds}


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
