"""One HTTP request on its way through the hooks and its handler: the declared route that it takes, and its answer.

`Routes` collects the declarations; the HTTP table, the OpenAPI document and the tests read them. An answer is bytes at
once (`BytesResponse`; `reply` encodes JSON with msgspec), or any other response of Starlette. `IncomingRequest` is
Starlette's, with headers that are found in a dictionary: a sample's two requests look up eleven headers, and Starlette
searches all that the client has sent each time. Does not know what a handler does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol, TypeVar, get_args

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from skyrl.api.access import Caller
from skyrl.api.bodies import Bound, LargeBody
from skyrl.base.wire.decoding import decode_json
from skyrl.storage.db import keys

T = TypeVar("T")


@lru_cache(maxsize=256)
def _as_received(name: str) -> bytes:
    return name.lower().encode("latin-1")


class IncomingHeaders(Headers):
    """Case-insensitive, as Starlette's. The first of several headers with one name counts."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self.first = dict(reversed(raw))
        """The first value of each name, both as received; the names are in lower case."""

    def get(self, key: str, default: T = None) -> str | T:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = self.first.get(_as_received(key))
        return default if value is None else value.decode("latin-1")

    def __getitem__(self, key: str) -> str:
        return self.first[_as_received(key)].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _as_received(key) in self.first


class IncomingRequest(Request):
    headers: IncomingHeaders = IncomingHeaders([])
    """An attribute in place of Starlette's property."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: IncomingHeaders) -> None:
        super().__init__(scope, receive, send)
        self.headers = headers  # pyright: ignore[reportIncompatibleMethodOverride]


_encoder = msgspec.json.Encoder()


class BytesResponse(Response):
    """Starlette's response for a body of bytes, without its general ways to make a body and headers: every sample has
    two of these answers. `media_type` has no text type, whose charset Starlette would add."""

    def __init__(self, body: bytes, media_type: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        if headers is not None:
            super().__init__(body, status, headers, media_type)
            return
        self.body, self.status_code, self.media_type, self.background = body, status, media_type, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type.encode("latin-1"))]


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> BytesResponse:
    """A JSON answer. `value` is anything msgspec encodes."""
    return BytesResponse(_encoder.encode(value), "application/json", status, headers)


def with_note(answer: Response, note: str | None) -> Response:
    """The answer with a sentence in ASCII for the user, if there is one. The SDK writes the text of this header, and of
    no other, to its user's log."""
    if note is not None:
        answer.headers["x-deprecation-note"] = note
    return answer


def strings(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """User metadata as the SDK reads it back: every value a string."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


RouteScope = Literal[keys.Scope, "agent", "any", "open", "signed"]
"""What a route requires: a key with that scope; `agent`: the key of an agent session, or one with the scope `sample`;
`any`: any accepted key, but an agent session's; `open`: nothing; `signed`: a link that this server has signed."""
KEYLESS: frozenset[RouteScope] = frozenset({"open", "signed"})
ROUTE_SCOPES: tuple[str, ...] = get_args(RouteScope)

Struct = type[msgspec.Struct]


@dataclass(frozen=True)
class Body:
    """A route's body. The OpenAPI document shows `schema`. The handler gets the body as `read_as` if given, else as
    `schema`; `read_as=bytes` is for a handler that decodes the body itself."""

    schema: Struct
    read_as: type[Any] | None = None
    optional: bool = False
    """A request without a body counts as one with the body `{}`."""
    protobuf: bool = False
    """The route also takes the same message as protobuf."""
    bound: Bound = "control"

    @property
    def handler_type(self) -> type[Any]:
        """The type that the handler gets."""
        return self.read_as or self.schema

    def decoded(self, content: bytes) -> Any:
        """The body as `handler_type`. Raises RequestError for a body that does not fit."""
        if self.read_as is bytes:
            return content
        return decode_json(self.handler_type, content or b"{}" if self.optional else content)


@dataclass(frozen=True, eq=False)
class Route:
    """One method of one path. `handler` takes a `Call`, the decoded body if the route has one, and the parameters."""

    method: str
    template: str
    """As FastAPI reads it: the path from the root, with parameters in braces. `{name:path}` matches slashes, too."""
    scope: RouteScope
    body: Body | None
    handler: Callable[..., Awaitable[Response]]
    parameters: tuple[str, ...]
    """Names of the parameters that FastAPI reads from path and query."""

    def run(self, call: Call, **parameters: Any) -> Awaitable[Response]:
        """Raises what the handler raises, and RequestError for a body that does not fit."""
        if self.body is None:
            return self.handler(call, **parameters)
        return self.handler(call, self.body.decoded(call.body), **parameters)

    @cached_property
    def path(self) -> str:
        """From the root, with parameters in braces."""
        return self.template.replace(":path}", "}")

    @property
    def is_direct(self) -> bool:
        """Whether the HTTP table calls it without FastAPI: nothing is to be read from path and query."""
        return "{" not in self.template and not self.parameters

    @property
    def keyless(self) -> bool:
        return self.scope in KEYLESS


class BufferedRequest(Protocol):
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
        self.whole: BufferedRequest | None = scope.get("whole")
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

    async def answer(self, whole: BytesResponse) -> None:
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


class Hook:
    """Called for each request before its route, and for each answer before it is sent."""

    name = ""

    def begin(self, call: Call) -> Coroutine[Any, Any, None] | None:
        """Before the route. A hook that has to wait returns a coroutine. Raises RequestError to refuse the request; any
        other error is answered with 500."""

    def end(self, call: Call) -> None:
        """Called once for each request, even if an earlier hook refused it: before the head of the answer is sent, or,
        with `call.status` None, after the client went away without an answer."""
