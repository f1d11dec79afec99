"""A route's declaration: refused at start when it does not fit, and the handler gets what it declares."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.call import Call
from skyrl.api.reply import reply
from skyrl.api.route import Body
from skyrl.api.routes import Routes
from skyrl.wire.errors import RequestError
from skyrl.wire.requests import FinishSessionRequest, ModelRequest


async def nothing(call: Call) -> Response:
    return reply({})


async def of_a_model(call: Call, wanted: ModelRequest, name: str = "") -> Response:
    return reply({"model": wanted.model_id, "name": name})


async def _receive() -> Any:
    raise AssertionError("nothing is read")


async def _send(_: object) -> None:
    raise AssertionError("nothing is sent")


def call_of(routes: Routes, body: bytes) -> Call:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    call = Call(scope, _receive, _send, routes.declared[0])
    call.body = body
    return call


@pytest.mark.parametrize("method", ["get", "post", "put", "delete"])
def test_route_without_a_scope_cannot_be_declared(method: str) -> None:
    with pytest.raises(TypeError, match="scope"):
        getattr(Routes("things"), method)("/x")


def test_scope_that_no_key_has_cannot_be_declared() -> None:
    wrong: Any = "everybody"
    with pytest.raises(ValueError, match="'everybody' is no scope; there is: train, sample, admin, any, open, signed"):
        Routes("things").get("/x", scope=wrong)


@pytest.mark.parametrize("scope", ["open", "signed"])
def test_route_without_a_key_takes_no_body(scope: Any) -> None:
    with pytest.raises(ValueError, match="without a key takes no body"):
        Routes("things").post("/x", scope=scope, body=ModelRequest)


@pytest.mark.parametrize("body", [ModelRequest, Body(ModelRequest, read_as=bytes)])
def test_handler_that_takes_another_body_than_declared_is_refused(body: Any) -> None:
    with pytest.raises(TypeError, match="POST /api/v1/x: its handler must begin with"):
        Routes("things").post("/x", scope="any", body=body)(nothing)
    with pytest.raises(TypeError, match="must begin with"):
        Routes("things").post("/x", scope="any", body=FinishSessionRequest)(of_a_model)


async def test_handler_gets_the_decoded_body_and_its_parameters() -> None:
    routes = Routes("things")
    routes.post("/x", scope="any", body=ModelRequest)(of_a_model)
    (route,) = routes.declared
    assert (route.method, route.path, route.parameters) == ("POST", "/api/v1/x", ("name",))
    answer = await route.run(call_of(routes, b'{"model_id": "m"}'), name="n")
    assert answer.body == b'{"model":"m","name":"n"}'
    with pytest.raises(RequestError, match="model_id"):
        await route.run(call_of(routes, b"{}"))


def test_optional_body_may_be_absent_and_others_may_not() -> None:
    assert Body(FinishSessionRequest, optional=True).decoded(b"") == FinishSessionRequest()
    with pytest.raises(RequestError, match="not JSON"):
        Body(FinishSessionRequest).decoded(b"")


async def test_route_that_the_table_has_not_found_does_not_run() -> None:
    """Its caller was not looked at."""
    routes, others = Routes("things"), Routes("others")
    routes.get("/x", scope="train")(nothing)
    others.get("/x", scope="open")(nothing)
    (route,) = routes.router.routes
    scope = {"type": "http", "method": "GET", "path": "/api/v1/x", "headers": [], "call": call_of(others, b"")}
    endpoint: Any = route.endpoint  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="GET /api/v1/x was not found"):
        await endpoint(Request(scope))
