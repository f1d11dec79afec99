"""The routes of a resource, each declared in one place: path, scope, body and handler."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.call import ROUTE_SCOPES, Body, Call, Route, RouteScope, Struct

API = "/api/v1"
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
Endpoint = Callable[..., Awaitable[Response]]
"""A route as FastAPI calls it."""


class Routes:
    """A resource's routes. A handler's first parameter is `call`. If the route has a body, the second is the decoded
    body. FastAPI reads the others from path and query.

    Each method of this class returns a decorator, and raises TypeError or ValueError at start for a declaration that
    does not fit its handler.
    """

    def __init__(self, tag: str, prefix: str = API) -> None:
        self.declared: list[Route] = []
        self._endpoints: list[Endpoint] = []
        """Of the declared routes, in their order."""
        self.tag = tag
        self._prefix = prefix

    def endpoints(self) -> Iterable[tuple[Route, Endpoint]]:
        """Each declared route, and what FastAPI calls for it."""
        return zip(self.declared, self._endpoints, strict=True)

    def get(self, path: str, *, scope: RouteScope) -> Callable[[Handler], Handler]:
        return self._declare("GET", path, scope, None)

    def delete(self, path: str, *, scope: RouteScope) -> Callable[[Handler], Handler]:
        return self._declare("DELETE", path, scope, None)

    def post(self, path: str, *, scope: RouteScope, body: Struct | Body | None = None) -> Callable[[Handler], Handler]:
        return self._declare("POST", path, scope, body)

    def put(self, path: str, *, scope: RouteScope, body: Struct | Body | None = None) -> Callable[[Handler], Handler]:
        return self._declare("PUT", path, scope, body)

    def _declare(
        self, method: str, path: str, scope: RouteScope, body: Struct | Body | None
    ) -> Callable[[Handler], Handler]:
        full_path = f"{self._prefix}{path}"
        declared_body = body if body is None or isinstance(body, Body) else Body(body)
        if scope not in ROUTE_SCOPES:
            raise ValueError(f"{method} {full_path}: {scope!r} is no scope; there is: {', '.join(ROUTE_SCOPES)}")
        if declared_body is not None and scope in ("open", "signed"):
            raise ValueError(
                f"{method} {full_path}: a route without a key takes no body: memory for bodies is counted by tenant"
            )

        def declare(handler: Handler) -> Handler:
            parameters = _parameters(handler, f"{method} {full_path}", declared_body)
            names = tuple(parameter.name for parameter in parameters)
            route = Route(method, full_path, scope, declared_body, handler, names)
            self.declared.append(route)
            self._endpoints.append(_endpoint(route, handler, parameters))
            return handler

        return declare


def _parameters(handler: Callable[..., Any], name: str, body: Body | None) -> list[inspect.Parameter]:
    """The handler's parameters after `call` and body. Raises TypeError if those two are not as declared."""
    expected = [Call] if body is None else [Call, body.handler_type]
    parameters = [*inspect.signature(handler, eval_str=True).parameters.values()]
    if [parameter.annotation for parameter in parameters[: len(expected)]] != expected:
        raise TypeError(f"{name}: its handler must begin with ({', '.join(kind.__name__ for kind in expected)})")
    return parameters[len(expected) :]


def _endpoint(route: Route, handler: Callable[..., Any], parameters: list[inspect.Parameter]) -> Endpoint:
    """The route as FastAPI calls it, with the handler's name and docstring and a signature that FastAPI reads."""

    async def endpoint(request: Request, **parameters: Any) -> Response:
        return await route.run(request.scope["call"], **parameters)

    request_parameter = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
    signature = inspect.Signature([request_parameter, *parameters], return_annotation=Response)
    endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
    endpoint.__signature__ = signature  # type: ignore[attr-defined]
    return endpoint


AccessScope = Annotated[Literal["owned", "accessible"], Query()]
"""FastAPI refuses any other value, and the answer is a 400 that names the parameter."""
