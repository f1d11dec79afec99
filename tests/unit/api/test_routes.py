"""The declaration of a route: a wrong one is refused at start, and the handler gets the arguments that it declares."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import Response

from skyrl.api.call import Body, Call, reply
from skyrl.api.routing import Routes
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import FinishSessionRequest, ModelRequest


async def answer_empty(call: Call) -> Response:
    return reply({})


async def answer_model(call: Call, request: ModelRequest, name: str = "") -> Response:
    return reply({"model": request.model_id, "name": name})


async def _receive() -> Any:
    raise AssertionError("the route must not read from the connection")


async def _send(_: object) -> None:
    raise AssertionError("the route must not write to the connection")


def call_of(routes: Routes, body: bytes) -> Call:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    call = Call(scope, _receive, _send, routes.declared[0])
    call.body = body
    return call


@pytest.mark.parametrize("method", ["get", "post", "put", "delete"])
def test_a_route_without_a_scope_cannot_be_declared(method: str) -> None:
    with pytest.raises(TypeError, match="scope"):
        getattr(Routes("things"), method)("/x")


def test_a_route_with_an_unknown_scope_cannot_be_declared() -> None:
    wrong: Any = "everybody"
    with pytest.raises(
        ValueError, match="'everybody' is no scope; there is: train, sample, admin, agent, any, open, signed"
    ):
        Routes("things").get("/x", scope=wrong)


@pytest.mark.parametrize("scope", ["open", "signed"])
def test_a_route_without_a_key_cannot_have_a_body(scope: Any) -> None:
    with pytest.raises(ValueError, match="without a key takes no body"):
        Routes("things").post("/x", scope=scope, body=ModelRequest)


@pytest.mark.parametrize("body", [ModelRequest, Body(ModelRequest, read_as=bytes)])
def test_a_handler_that_takes_another_body_than_declared_is_refused(body: Any) -> None:
    with pytest.raises(TypeError, match="POST /api/v1/x: its handler must begin with"):
        Routes("things").post("/x", scope="any", body=body)(answer_empty)
    with pytest.raises(TypeError, match="must begin with"):
        Routes("things").post("/x", scope="any", body=FinishSessionRequest)(answer_model)


async def test_a_handler_gets_the_decoded_body_and_its_parameters() -> None:
    routes = Routes("things")
    routes.post("/x", scope="any", body=ModelRequest)(answer_model)
    (route,) = routes.declared
    assert (route.method, route.path, route.parameters) == ("POST", "/api/v1/x", ("name",))
    answer = await route.run(call_of(routes, b'{"model_id": "m"}'), name="n")
    assert answer.body == b'{"model":"m","name":"n"}'
    with pytest.raises(RequestError, match="model_id"):
        await route.run(call_of(routes, b"{}"))


def test_only_an_optional_body_may_be_absent() -> None:
    assert Body(FinishSessionRequest, optional=True).decoded(b"") == FinishSessionRequest()
    with pytest.raises(RequestError, match="not JSON"):
        Body(FinishSessionRequest).decoded(b"")
