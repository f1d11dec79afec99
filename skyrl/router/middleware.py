"""The protocol of the router's middleware, and a base class that hides ASGI.

A middleware is an ASGI application that is made with the next application: `Plugin(app, router=context)`, the form that
Starlette and slime's router use. `RouterMiddleware` turns it into one method, `handle(request, call_next)`.
docs/howto/middleware.md is the page for authors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Protocol

from skyrl.router.context import RouterContext
from skyrl.router.messages import AsgiApp, Call, Receive, Request, Response, Scope, Send

CallNext = Callable[[Request], Awaitable[Response]]
"""Sends the request on and returns the answer. May be called more than once for one request."""


class Middleware(Protocol):
    """What `--middleware` loads. `stats()`, if it has that method, is shown by `GET /statusz`."""

    def __init__(self, app: AsgiApp, *, router: RouterContext) -> None: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class RouterMiddleware:
    """Override `handle`. State belongs on `self`: one object serves all requests of a router process, on one event
    loop. An exception fails its own request with 500 and is counted; other requests go on."""

    def __init__(self, app: AsgiApp, *, router: RouterContext) -> None:
        self.app = app
        self.router = router

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        return await call_next(request)

    def stats(self) -> Mapping[str, int | float]:
        """Numbers for `GET /statusz`."""
        return {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        async with AsyncExitStack() as calls:

            async def call_next(request: Request) -> Response:
                call = Call(self.app, request)
                calls.push_async_callback(call.close)
                return await call.response()

            request = Request(scope, receive, self.router.max_body_bytes)
            response = await self.handle(request, call_next)
            await response.send(send)
