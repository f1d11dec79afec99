"""The application factory: routes, and the one place where errors become answers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl import __version__
from skyrl.api import (
    audit,
    auth,
    billing,
    capabilities,
    checkpoints,
    copying,
    downloads,
    futures,
    health,
    models,
    sampling,
    search,
    sessions,
    traces,
    training,
    weights,
)
from skyrl.api.body import CONTROL_BYTES
from skyrl.api.body_memory import BodyReader
from skyrl.api.openapi import describe
from skyrl.api.refusals import Refusals
from skyrl.api.reply import reply
from skyrl.api.services import Services
from skyrl.db.faults import DatabaseError, column_with_nul, is_transient, reason
from skyrl.storage.base import NotStored, StoreError
from skyrl.wire.errors import InvalidToken, NoSpace, OverQuota, RequestError

logger = logging.getLogger(__name__)

RESOURCES = (
    futures,
    sampling,
    training,
    weights,
    models,
    search,
    sessions,
    traces,
    capabilities,
    checkpoints,
    copying,
    downloads,
    auth,
    audit,
    billing,
    health,
)


DATABASE_RETRY_S = 2.0
"""When a client whose request the database did not take is to send it again."""

API = "/api/v1"
MAX_PATH = 200
"""Characters of an unknown path that its answer repeats."""

Endpoint = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """FastAPI, but that a POST to an endpoint which takes nothing but the request goes straight there.

    Routing, solving dependencies that there are none of, and three layers of middleware cost several times what
    the endpoints of a sample do themselves. Errors become answers by the same handlers. Middleware that is added to
    the application does not see these requests.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._direct: dict[str, Endpoint] = {}

    def openapi(self) -> dict[str, Any]:
        """The document behind `/openapi.json`, made at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(self.title, self.version, self.description, self.routes)
        return self.openapi_schema

    def route_directly(self) -> None:
        """To be called when all routes are there."""
        for route in self.routes:
            if not isinstance(route, APIRoute) or route.methods != {"POST"}:
                continue
            if [*inspect.signature(route.endpoint).parameters] == ["request"]:
                self._direct[route.path] = route.endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)

    async def _answer(self, request: Request, error: Exception) -> Response:
        """What the handler of the error's nearest class says; there is one of Exception."""
        handler: Any = next(self.exception_handlers[c] for c in type(error).__mro__ if c in self.exception_handlers)
        return await handler(request, error)


def _no_such_path(path: str) -> str:
    """What a path is told that no route has. An SDK puts `/api/v1` behind its base URL."""
    asked = path if len(path) <= MAX_PATH else f"{path[:MAX_PATH]}..."
    if path.startswith(f"{API}{API}"):
        return f"no such path {asked!r}; the base URL ends before {API}"
    return f"no such path {asked!r}"


def create_app(services: Services) -> Application:
    """All routes over these services. Every error answer is `{"detail": sentence, "field": name or null}`."""
    app = Application(
        title="skyrl",
        version=__version__,
        description="A self-hosted server for the Tinker API",
        docs_url=None,  # those pages load scripts from elsewhere; /openapi.json is there
        redoc_url=None,
    )
    app.state.access = services.access
    app.state.bodies = BodyReader(services.config.state_dir, CONTROL_BYTES)
    for resource in RESOURCES:
        app.include_router(resource.router(services))
    refusals = Refusals(services.access)

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        refusals.note(request, error.status, error.message, error)
        if isinstance(error, OverQuota):
            services.quotas.refused[error.quota] += 1
        headers = {"Retry-After": f"{error.retry_after_s:g}"} if error.retry_after_s is not None else {}
        if isinstance(error, NoSpace):
            headers |= error.headers
        if isinstance(error, InvalidToken):
            headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
        return reply({"detail": error.message, "field": error.field}, error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return await refused(request, RequestError(first["msg"], field=field))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        detail = _no_such_path(request.url.path) if error.status_code == 404 else str(error.detail)
        refusals.note(request, error.status_code, detail)
        return reply({"detail": detail, "field": None}, error.status_code, dict(error.headers or {}))

    @app.exception_handler(NotStored)
    async def lost(request: Request, error: NotStored) -> Response:
        logger.error("%s %s: %s", request.method, request.url.path, error)
        return reply({"detail": "the checkpoint's files are not in the checkpoint store any more", "field": None}, 404)

    @app.exception_handler(StoreError)
    async def store_away(request: Request, error: StoreError) -> Response:
        logger.error("%s %s: %s", request.method, request.url.path, error)
        return reply({"detail": "the checkpoint store cannot be used now; try again", "field": None}, 503)

    @app.exception_handler(DatabaseError)
    async def database_away(request: Request, error: DatabaseError) -> Response:
        if is_transient(error):
            logger.error("%s %s: the database cannot be used: %s", request.method, request.url.path, reason(error))
            detail = "the database cannot be used now; send the request again"
            return reply({"detail": detail, "field": None}, 503, {"Retry-After": f"{DATABASE_RETRY_S:g}"})
        if (column := column_with_nul(error)) is not None:
            return reply({"detail": f"{column}: must not hold the character U+0000", "field": column}, 400)
        return await internal(request, error)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return reply({"detail": f"internal error: {type(error).__name__}", "field": None}, 500)

    app.route_directly()
    return app
