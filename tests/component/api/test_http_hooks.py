"""Every request passes through each hook of the HTTP table: on every route, unknown path, wrong method and error."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
from api_harness import Api
from starlette.requests import Request

from skyrl.api.app import create_app
from skyrl.api.call import Call, Hook, Route
from skyrl.api.table import MAX_REQUEST_ID, HttpTable
from skyrl.runtime.processes.logs import LineFormat

KEY = {"X-API-Key": "tml-one"}
NAMES = {
    "session_id": "s",
    "sampler_id": "x",
    "model_id": "m",
    "run_id": "m",
    "agent_session": "s",
    "agent_turn": "t",
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


class RecordingHook:
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
class RaisingHook:
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
