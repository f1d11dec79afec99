"""The application factory: routes, and the one place where errors become answers."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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
from skyrl.api.reply import reply
from skyrl.api.services import Services
from skyrl.storage.base import NotStored, StoreError
from skyrl.wire.errors import InvalidToken, RequestError

logger = logging.getLogger(__name__)

# The two routes of every sample first: routes are matched in order.
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


def create_app(services: Services) -> FastAPI:
    """All routes over these services. Every error answer is `{"detail": sentence, "field": name or null}`."""
    app = FastAPI(
        title="skyrl",
        version=__version__,
        description="A self-hosted server for the Tinker API",
        docs_url=None,  # those pages load scripts from elsewhere; /openapi.json is there
        redoc_url=None,
    )
    app.state.tokens = services.tokens
    for resource in RESOURCES:
        app.include_router(resource.router(services))

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        headers = {"Retry-After": f"{error.retry_after_s:g}"} if error.retry_after_s is not None else {}
        if isinstance(error, InvalidToken):
            headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
        return reply({"detail": error.message, "field": error.field}, error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return reply({"detail": f"{field}: {first['msg']}", "field": field}, 400)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return reply({"detail": str(error.detail), "field": None}, error.status_code, dict(error.headers or {}))

    @app.exception_handler(NotStored)
    async def lost(request: Request, error: NotStored) -> Response:
        logger.error("%s %s: %s", request.method, request.url.path, error)
        return reply({"detail": "the checkpoint's files are not in the checkpoint store any more", "field": None}, 404)

    @app.exception_handler(StoreError)
    async def store_away(request: Request, error: StoreError) -> Response:
        logger.error("%s %s: %s", request.method, request.url.path, error)
        return reply({"detail": "the checkpoint store cannot be used now; try again", "field": None}, 503)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return reply({"detail": f"internal error: {type(error).__name__}", "field": None}, 500)

    return app
