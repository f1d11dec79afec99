"""The HTTP table: every HTTP request goes through it and its hooks, on every route.

A POST to a path without parameters goes straight to its handler: FastAPI's routing, dependencies and middleware cost
several times what the handlers of a sample do themselves. All other requests go on to FastAPI, which finds the handler
and reads the parameters, or answers that there is no such path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from fastapi import FastAPI
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from skyrl.chat.openai.service import ClientGone
from skyrl.server.api.call import Call, Hook
from skyrl.server.api.error_answers import ErrorAnswers
from skyrl.server.api.reply import WholeBody
from skyrl.server.api.route import Route


class HttpTable:
    """An ASGI application. Each of `hooks` begins before the route, in their order; no request skips a hook."""

    def __init__(
        self,
        make_framework: Callable[[], FastAPI],
        routes: Iterable[Route],
        hooks: Sequence[Hook],
        errors: ErrorAnswers,
    ) -> None:
        self._make_framework = make_framework
        self.routes = (*routes,)
        self.hooks = (*hooks,)
        self._errors = errors
        self.direct = {
            route.path: route
            for route in self.routes
            if route.method == "POST" and "{" not in route.path and not route.parameters
        }
        """The routes that are called without FastAPI, by path."""
        self._patterns: list[tuple[str, re.Pattern[str], Route]] = [
            (route.method, compile_path(route.template)[0], route) for route in self.routes
        ]

    @cached_property
    def framework(self) -> FastAPI:
        """FastAPI with all routes, made when it is first needed."""
        return self._make_framework()

    def prepare(self) -> None:
        """Make FastAPI's routes now: that takes a tenth of a second, for which otherwise the first request that needs
        them would hold up all others."""
        assert self.framework.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.framework(scope, receive, send)
            return
        direct = self.direct.get(scope["path"]) if scope["method"] == "POST" else None
        call = Call(scope, receive, send, direct or self._find(scope), self.hooks)
        try:
            for hook in self.hooks:
                if (waiting := hook.begin(call)) is not None:
                    await waiting
            if direct is not None:
                response = await direct.run(call)
                if isinstance(response, WholeBody):
                    await call.answer(response)
                else:
                    await response(scope, receive, call.send)
            else:
                scope["call"] = call
                await self.framework(scope, receive, call.send)
        except ClientGone:
            pass
        except Exception as error:  # ErrorAnswers knows each kind, and logs the server's own faults
            if call.answered:
                raise
            await call.answer(self._errors.answer(call, error))
        finally:
            call.end()

    def _find(self, scope: Scope) -> Route | None:
        """The route that FastAPI will find: the first with a method and a path that fit."""
        method, path = scope["method"], scope["path"]
        for route_method, pattern, route in self._patterns:
            if route_method == method and pattern.match(path):
                return route
        return None
