"""The short way through the router: a whole, small request goes to a worker without a task and without ASGI.

Only requests that the long way (`app`, `proxy`) would treat in the same manner come here: no middleware, not one of the
router's own routes, a body that fits into one buffer, a free slot, and an unused connection to the chosen worker. All
others take the long way. docs/decisions/router.md has the figures that are the reason for two ways.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from skyrl.http.admin_key import FORWARDING, AdminKey, forwarded_for
from skyrl.http.client import lines_of
from skyrl.http.connection import Connection, Origin, address_of
from skyrl.http.forward import RequestHead
from skyrl.http.server import BufferedRequests
from skyrl.router.messages import INTERRUPTED, refusal
from skyrl.router.policies import RequestFacts
from skyrl.router.proxy import CHOSEN, Proxy, is_vllms
from skyrl.router.worker import Worker

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

LEAN_BODY_BYTES = 64 * 2**10
_METHODS = frozenset((b"POST", b"GET", b"PUT", b"DELETE"))


class FastPathRule:
    """Which requests take the short way. `is_own(path)`: the router answers this path itself."""

    def __init__(self, proxy: Proxy, is_own: Callable[[str], bool], key: AdminKey | None) -> None:
        self.proxy = proxy
        self._is_own = is_own
        self._key = key
        self._most_bytes = min(LEAN_BODY_BYTES, proxy.limits.body_bytes)

    def takes(self, method: bytes, url: bytes, head: RequestHead, headers: list[tuple[bytes, bytes]]) -> bool:
        if method not in _METHODS or head.length > self._most_bytes or (head.has_body and head.length < 0):
            return False
        path = url.partition(b"?")[0]
        if not path.startswith(b"/") or b"%" in path or b"#" in url or self._is_own(path.decode("latin-1")):
            return False  # a worker may read an encoded path, or one with a fragment, as one of the router's own
        return self._key is None or self._key.is_in(headers)


class FastCycle:
    """One request on the short way. Stands where uvicorn keeps the request that runs on a connection, and has the
    attributes that uvicorn reads there."""

    __slots__ = (
        "_chunked", "_connection", "_origin", "_protocol", "_proxy", "_worker", "body", "disconnected", "keep_alive",
        "more_body", "response_complete", "response_started",
    )  # fmt: skip

    def __init__(
        self, protocol: RouterHttp, proxy: Proxy, worker: Worker, origin: Origin, connection: Connection
    ) -> None:
        self._protocol = protocol
        self._proxy = proxy
        self._worker = worker
        self._origin = origin
        self._connection = connection
        self._chunked = False
        self.body = bytearray()
        self.more_body = False
        self.keep_alive = protocol.parser.should_keep_alive()
        self.response_started = False
        self.response_complete = False
        self.disconnected = False

    @property
    def message_event(self) -> FastCycle:
        """A property, because an attribute would be a cycle, which only the garbage collector frees."""
        return self

    def set(self) -> None:
        """uvicorn calls this, as that of its event, when the client's connection is lost."""
        if self.disconnected and not self.response_complete:
            self._proxy.counts["client_left"] += 1
            self._end(whole=False)

    def start(self, request: bytes) -> None:
        self._proxy.pool.begin(self._worker)
        self._worker.exchanges.add(self._connection)
        self._connection.sink = self
        self._connection.send(request)

    def advance(self) -> None:
        """More of the answer has arrived, the client reads again, or the worker's connection broke."""
        connection, transport = self._connection, self._protocol.transport
        if self.response_complete:
            return
        if not connection.head_complete:
            if connection.failure is not None:
                self._fail(connection.failure)
            return
        if self._protocol.flow.write_paused and connection.failure is None:
            return  # the answer waits in the connection, which reads no further when it holds too much
        body, complete = connection.take(), connection.complete
        if not self.response_started:
            self.response_started = True
            transport.write(self._head(connection.status, connection.headers, body, complete))
        elif self._chunked:
            if body:
                transport.write(b"%x\r\n%s\r\n" % (len(body), body))
            if complete:
                transport.write(b"0\r\n\r\n")
        elif body:
            transport.write(body)
        if complete:
            self._proxy.counts["answered"] += 1
            self._end(whole=True)
        elif connection.failure is not None:
            logger.warning("an answer broke off: %s: %s", self._worker.url, connection.failure)
            self._proxy.counts["interrupted"] += 1
            self._end(whole=False)

    def _head(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, complete: bool) -> bytes:
        """The head of the answer with what there is of its body."""
        parts = [STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status]
        has_length = status in (204, 304)
        for name, value in self._proxy.answer_headers(self._worker, status, headers):
            has_length = has_length or name == b"content-length"
            parts += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        if has_length:
            parts += (b"\r\n", body)
        else:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n\r\n")
            if body:
                parts.append(b"%x\r\n%s\r\n" % (len(body), body))
            if complete:
                parts.append(b"0\r\n\r\n")
        return b"".join(parts)

    def _fail(self, reason: str) -> None:
        self._proxy.counts["interrupted"] += 1
        message = f"no answer from {self._worker.url} ({reason}); it may have processed the request"
        answer = refusal(502, INTERRUPTED, message, self._proxy.name_of(self._worker))
        lines = lines_of((*answer.headers, (b"content-length", b"%d" % len(answer.body))))
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        self.response_started = True
        self._protocol.transport.write(b"%s%s%s\r\n%s" % (STATUS_LINE[502], lines, closing, answer.body))
        self._end(whole=True)

    def _end(self, *, whole: bool) -> None:
        """`whole`: the client has a whole answer, and may send its next request on this connection."""
        self.response_complete = True
        proxy = self._proxy
        self._worker.exchanges.discard(self._connection)
        proxy.client.pool.give_back(self._origin, self._connection)
        proxy.pool.end(self._worker)
        proxy.slots.release()
        if not whole or not self.keep_alive:
            self._protocol.transport.close()
        if not self.disconnected:
            self._protocol.on_response_complete()


class RouterHttp(BufferedRequests):
    """The client's side of a connection: gives each request to the short way or to uvicorn."""

    rule: FastPathRule
    """Set once per process, on a subclass: see `protocol_with`."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._head = RequestHead.of([])
        """Of the request that is arriving on the short way."""
        self._forwarded: list[tuple[bytes, bytes]] = []
        """Tells workers that the client is not on this machine."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._forwarded = forwarded_for(self.client)

    def takes(self) -> bool:
        if self._forwarded and not any(name in FORWARDING for name, _ in self.headers):
            self.headers += self._forwarded
        self._head = head = RequestHead.of(self.headers)
        return self.rule.takes(self.parser.get_method(), self.url, head, self.headers)

    def start(self, body: bytes) -> bool:
        path = self.url.partition(b"?")[0].decode("latin-1")
        proxy = self.rule.proxy
        facts = RequestFacts(self._head.key, proxy.adapter(path, body))
        if not proxy.slots.try_acquire():  # the worker is chosen when the request's turn has come
            return False
        worker = proxy.pool.choose(facts)
        if worker is None or not self._start_fast(worker, path, self._head, body):
            proxy.slots.release()
            self.hand_over(body, more=False)
            self.scope[CHOSEN] = worker  # type: ignore[typeddict-unknown-key]
        return True

    def _start_fast(self, worker: Worker, path: str, head: RequestHead, body: bytes) -> bool:
        """False: this request must take the long way. The caller has taken a slot."""
        proxy = self.rule.proxy
        other = worker.completions_url if worker.completions_url is not None and is_vllms(path) else None
        address = address_of(other or worker.url)
        connection = proxy.client.pool.take(address.origin)
        if connection is None:
            return False
        length = b"content-length: %d\r\n" % len(body) if head.has_body else b""
        request = b"%s %s%s HTTP/1.1\r\nhost: %s\r\n%s%s\r\n%s" % (
            self.parser.get_method(), address.path, self.url, address.host, head.lines, length, body,
        )  # fmt: skip
        cycle = FastCycle(self, proxy, worker, address.origin, connection)
        self.cycle = self._running = cycle  # type: ignore[assignment]
        cycle.start(request)
        return True

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self._running, FastCycle):
            self._running.advance()


def protocol_with(rule: FastPathRule) -> type[asyncio.Protocol]:
    """The class of connections for uvicorn."""
    return type("RouterConnection", (RouterHttp,), {"rule": rule})
