"""One HTTP request on its way through the API, and the head of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from skyrl.api.access import Caller
from skyrl.api.body_memory import LargeBody
from skyrl.api.route import Route


class Call:
    """What the hooks have found out about a request, for its handler. `send` is where its answer goes."""

    __slots__ = (
        "_caller",
        "_ending",
        "_send",
        "answered",
        "body",
        "headers",
        "held",
        "id",
        "request",
        "route",
        "status",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, route: Route | None, hooks: Sequence[Hook] = ()
    ) -> None:
        self.request = Request(scope, receive, send)
        self.route = route
        """None where no route has the path and method of the request."""
        self.id = "-"
        """The request's name in the log and in the header `X-Request-Id` of the answer."""
        self.body = b""
        """The decompressed body, of a route that declares one."""
        self.held: LargeBody | None = None
        """The memory that a large body takes until the route has its answer."""
        self.headers: list[tuple[bytes, bytes]] = []
        """What hooks add to the headers of the answer."""
        self.status: int | None = None
        """Of the answer; None while there is none."""
        self.answered = False
        """Whether the head of the answer is sent, so that no other answer can be given."""
        self._caller: Caller | None = None
        self._send = send
        self._ending = iter(hooks)

    @property
    def caller(self) -> Caller:
        """Whom the request's key stands for. Raises RuntimeError on a route that takes no key."""
        if self._caller is None:
            raise RuntimeError("this route asks for no key, so nobody is known to call it")
        return self._caller

    @caller.setter
    def caller(self, caller: Caller) -> None:
        self._caller = caller

    @property
    def tenant(self) -> str:
        """Who owns what the request makes."""
        return self.caller.tenant

    async def send(self, message: Message) -> None:
        """An ASGI `send`: the head of the answer ends the hooks' work and takes their headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.end()
            self.answered = True
            message = {**message, "headers": [*message["headers"], *self.headers]}
        await self._send(message)

    def end(self) -> None:
        """Tell each hook, once, that the request has its answer, or that it gets none. Raises what a hook raises; the
        next call goes on with the hook behind it."""
        for hook in self._ending:
            hook.end(self)


class Hook(Protocol):
    """Sees each request before its route and each answer before it is sent."""

    name: str

    async def begin(self, call: Call) -> None:
        """Before the route. Raises RequestError to refuse the request; any other error is answered with 500."""
        ...

    def end(self, call: Call) -> None:
        """Called once for each request, also for one that an earlier hook refused. The answer's head is about to be
        sent; or, where `call.status` is None, the client went away before it."""
        ...
