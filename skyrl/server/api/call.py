"""One HTTP request on its way through the hooks and its handler, and the head of its answer."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from skyrl.server.api.access import Caller
from skyrl.server.api.body_memory import LargeBody
from skyrl.server.api.incoming import IncomingHeaders, IncomingRequest
from skyrl.server.api.reply import WholeBody
from skyrl.server.api.route import Route


class WholeRequest(Protocol):
    """A request whose body has arrived, and the short way for its answer."""

    whole_body: bytes
    received: IncomingHeaders

    async def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send head and body at once. `headers` has the body's length."""
        ...


class Call:
    """A request with what the hooks add to it for the handler. The handler's answer goes to `send`."""

    __slots__ = (
        "_caller",
        "_receive",
        "_request",
        "_send",
        "_unended_hooks",
        "answered",
        "began",
        "body",
        "headers",
        "id",
        "large_body",
        "received",
        "recorded",
        "route",
        "scope",
        "status",
        "whole",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, route: Route | None, hooks: Sequence[Hook] = ()
    ) -> None:
        self.scope = scope
        self.route = route
        """None if no route has the path and method of the request."""
        self.id = "-"
        """The request's id in the log and in the answer's header `X-Request-Id`."""
        self.began = 0.0
        """When the request arrived, in the time of `time.perf_counter`."""
        self.recorded: str | None = None
        """The id of the command or sample that the request has recorded. The engine and vLLM know it by this id."""
        self.body = b""
        """The decompressed body; empty if the route declares none."""
        self.large_body: LargeBody | None = None
        """The body whose memory is held until the route has answered."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers that hooks add to the answer."""
        self.status: int | None = None
        """The status of the answer; None before the answer."""
        self.answered = False
        """Whether the head of the answer is sent. After that no other answer can be given."""
        self.whole: WholeRequest | None = scope.get("whole")
        """The connection's side of a request that came as a whole; None for requests that came through uvicorn."""
        self.received = IncomingHeaders(scope["headers"]) if self.whole is None else self.whole.received
        """The headers of the request."""
        self._request: IncomingRequest | None = None
        self._caller: Caller | None = None
        self._receive, self._send = receive, send
        self._unended_hooks = iter(hooks)

    @property
    def request(self) -> IncomingRequest:
        """Starlette's request. A sample needs only `received`, and makes none."""
        if self._request is None:
            self._request = IncomingRequest(self.scope, self._receive, self._send, self.received)
        return self._request

    @property
    def caller(self) -> Caller:
        """The caller that the request's key stands for. Raises RuntimeError on a route that takes no key."""
        if self._caller is None:
            raise RuntimeError("this route takes no API key, so its caller is unknown")
        return self._caller

    @caller.setter
    def caller(self, caller: Caller) -> None:
        self._caller = caller

    @property
    def known_tenant(self) -> str | None:
        """The caller's tenant; None where no key was needed or accepted."""
        return None if self._caller is None else self._caller.tenant

    @property
    def tenant(self) -> str:
        """The caller's tenant, which owns what the request makes."""
        return self.caller.tenant

    async def send(self, message: Message) -> None:
        """An ASGI `send`. Before the head of the answer is sent, the hooks end, and their headers are added to it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.end()
            self.answered = True
            message = {**message, "headers": [*message["headers"], *self.headers]}
        await self._send(message)

    async def answer(self, whole: WholeBody) -> None:
        """Send a whole answer, as `send` does its two messages."""
        self.status = whole.status_code
        self.end()
        self.answered = True
        headers = [*whole.raw_headers, *self.headers]
        if self.whole is not None:
            await self.whole.answer(whole.status_code, headers, whole.body)
            return
        await self._send({"type": "http.response.start", "status": whole.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": whole.body})

    def end(self) -> None:
        """Call `end` of each hook, once. Raises what a hook raises; another call then goes on with the next hook."""
        for hook in self._unended_hooks:
            hook.end(self)


class Hook(Protocol):
    """Called for each request before its route, and for each answer before it is sent."""

    name: str

    def begin(self, call: Call) -> Coroutine[Any, Any, None] | None:
        """Before the route. A hook that has to wait returns a coroutine. Raises RequestError to refuse the request; any
        other error is answered with 500."""
        ...

    def end(self, call: Call) -> None:
        """Called once for each request, even if an earlier hook refused it: before the head of the answer is sent, or,
        with `call.status` None, after the client went away without an answer."""
        ...
