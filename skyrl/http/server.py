"""The connections of every HTTP server of skyrl: uvicorn's, with bounds.

`BoundedHttp` is uvicorn's side of a connection, with limits on requests that are not complete yet, and on answers that
nobody reads. No API key has been checked before a request is complete. uvicorn keeps a head or a trailer of any length,
and waits for ever for a first request, for the rest of one, or for a client that does not read. It closes the
connection at once after the answer to a request that asks for that, also while the body still arrives: the client then
sees a broken pipe in the place of the answer. Here the rest of the body is read and thrown away first.

`BufferedRequests` hands small requests on when they have arrived, and all others to uvicorn. uvicorn starts a request's
task when its head is complete. A small body nearly always comes with its head, so a subclass can treat the whole
request at once, at a fraction of the cost; the subclass knows which requests. Knows bytes and time, not routes."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from skyrl.http.shared_memory import UnreadAnswers
from skyrl.runtime.processes.logs import LimitedLog

if TYPE_CHECKING:
    import httptools

logger = logging.getLogger(__name__)
_refusals = LimitedLog(logger)

HEAD_BYTES = 64 * 2**10
"""The most bytes of a request beside its body: request line, headers, trailers, and the frames of its chunks."""
MOST_HEADERS = 256
"""Of a request; as many trailers. Thousands of tiny ones would fit HEAD_BYTES, and take the event loop 25 ms."""
FRAMES_SHARE = 16
"""A request may have the bytes of its body, divided by this, beside HEAD_BYTES: a long body has many chunks."""
IDLE_S = 75.0
"""How long a new connection may send no request: as long as uvicorn keeps a connection after a request."""
REST_S = 30.0
"""How long a head may take to arrive. No limit holds while the server does not read the connection, because earlier
requests are unanswered."""
LEAST_BYTES = 64 * 2**10
"""How many bytes of an unfinished body must arrive in each REST_S in which the server reads it."""
UNREAD_S = 60.0
"""How long a client may take nothing of an answer of which more waits than the transport keeps without complaint
(64 KiB). Then the connection is cut, and the request ends as if the client had gone."""
REFUSED_BYTES = 512 * 2**20
"""How many more bytes of a body are read and thrown away after its request has been answered, as with 413 or 401. Many
clients read an answer only after they have sent the whole body."""
REFUSED_S = 30.0
"""How long these bytes may take to arrive."""
SPARE_DESCRIPTORS = 1024
"""File descriptors that are kept for the database and the inference server; at most a quarter of the limit."""


def most_connections() -> int:
    """How many connections the limit on open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files - min(SPARE_DESCRIPTORS, files // 4)


class _ClosedAfterBody:
    """A connection's transport, for one request whose body still arrives: `close` does nothing while the rest of the
    body of an answered request is awaited."""

    def __init__(self, connection: BoundedHttp) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        if not self._connection.awaits_refused_body():
            self._connection.transport.close()


class BoundedHttp(HttpToolsProtocol):
    """A request that arrives in one piece, as nearly all do, costs two comparisons."""

    unread: UnreadAnswers | None = None
    """The bound of all answers of a process that nobody reads. None where the clients are skyrl's, which hold large
    answers back on purpose."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._between_requests = True
        """All requests that have begun to arrive are complete."""
        self._in_head = False
        self._bytes_beside_body = 0
        self._body_bytes = 0
        self._body_bytes_at_last_check = 0
        self._running: Any = None
        """The request that is being answered. uvicorn's `cycle` is the latest, which may wait behind it."""
        self._was_paused = False
        """The server has paused reading since the last check."""
        self._refused_bytes: int | None = None
        """Bytes of the body that have been thrown away; None unless a request is answered whose body arrives."""
        self._deadline: float | None = None
        """In the event loop's time; None until the next `_schedule_check`."""
        self._unread_check: asyncio.TimerHandle | None = None
        self._unused_since = 0.0
        """When the last answer was complete, in the event loop's time."""
        self._unused_check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= most_connections():
            self.transport = transport
            line = (
                f"connections are refused: {len(self.connections)} are open, and more need more open files (ulimit -Hn)"
            )
            _refusals.say(logging.WARNING, "connections", line)
            transport.abort()
            return
        super().connection_made(transport)
        self._schedule_check()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_unread_after(left := self.transport.get_write_buffer_size())
        if self.unread is not None:
            in_kernel = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            self.unread.add(self.transport, left + in_kernel, self.loop.time())  # what was sent stays in memory, too

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_check()
        if self._running is not None and self._running.response_complete:
            self._go_on()

    def _check_unread_after(self, unread: int) -> None:
        self._unread_check = self.loop.call_later(UNREAD_S, self._check_unread, unread)

    def _check_unread(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._check_unread_after(unread)
        else:
            self.transport.abort()

    def _stop_unread_check(self) -> None:
        if self._unread_check is not None:
            self._unread_check.cancel()
            self._unread_check = None
            if self.unread is not None:
                self.unread.remove(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._stop_unread_check()
        if self._unused_check is not None:
            self._unused_check.cancel()
            self._unused_check = None
        super().connection_lost(exc)
        running = self._running
        if isinstance(running, RequestResponseCycle):
            running.transport = self.transport  # `_ClosedAfterBody` knows this connection, too
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        if self.cycle is None or self.cycle.response_complete:
            # It knows this connection, so only the garbage collector would free both.
            self.cycle = self._running = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._bytes_beside_body += len(data)
        super().data_received(data)
        if self._between_requests and self.cycle is not None and not self.cycle.response_complete:
            return
        if self.transport.is_closing():
            return
        if self._bytes_beside_body > HEAD_BYTES + self._body_bytes // FRAMES_SHARE:
            self._refuse(431, f"a request may have {HEAD_BYTES} bytes beside its body")
        else:
            self._schedule_check()

    def on_message_begin(self) -> None:
        self._between_requests, self._in_head, self._deadline = False, True, None
        super().on_message_begin()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if self.transport.is_closing():  # the request came behind the last one of its connection
            return
        self._running = cycle
        cycle.transport = _ClosedAfterBody(self)
        super()._start_asgi_task(cycle, app)

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, with a bound. What is raised ends the parsing: see `send_400_response`."""
        if len(self.headers) >= MOST_HEADERS:
            raise ValueError
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head, self._deadline = False, None
        super().on_headers_complete()
        self.headers = []  # trailers go here, and nobody reads them: they must not become headers

    def on_body(self, body: bytes) -> None:
        self._bytes_beside_body -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)
        if self._refused_bytes is not None:
            self._refused_bytes += len(body)
            if self._refused_bytes > REFUSED_BYTES:
                self.transport.abort()
        self._was_paused = self._was_paused or self.flow.read_paused

    def on_message_complete(self) -> None:
        self._between_requests, self._deadline = True, None
        self._bytes_beside_body = self._body_bytes = self._body_bytes_at_last_check = 0
        super().on_message_complete()
        if self._refused_bytes is not None:
            self._refused_bytes = None
            if self.cycle.keep_alive:
                self._wait_for_next_request()
            else:
                self.transport.close()

    def awaits_refused_body(self) -> bool:
        """Whether the request that runs, or ran last, is answered while its body still arrives."""
        cycle = self._running
        in_body = not self._between_requests and not self._in_head
        return in_body and cycle is self.cycle and cycle.response_complete

    def on_response_complete(self) -> None:
        """As uvicorn's, but with one timer at a time, and not a new one for each answer. No further request begins
        before the client has taken nearly all of this answer: many large ones would wait in memory."""
        self.server_state.total_requests += 1
        if self.flow.write_paused:
            self.flow.pause_reading()
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.awaits_refused_body():
            self._refused_bytes = 0
            self._deadline = self.loop.time() + REFUSED_S
            self._schedule_check()
        else:
            self._wait_for_next_request()

    def _wait_for_next_request(self) -> None:
        self._unused_since = self.loop.time()
        if self._unused_check is None:
            self._unused_check = self.loop.call_later(self.timeout_keep_alive, self._check_unused)

    def _check_unused(self) -> None:
        """Close the connection if no request came for `timeout_keep_alive` after the last answer. While a request runs
        or arrives, nothing is to do: its answer starts the next check."""
        self._unused_check = None
        is_running = self.flow.write_paused or (self.cycle is not None and not self.cycle.response_complete)
        if self.transport.is_closing() or is_running or not self._between_requests:
            return
        left_s = self._unused_since + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self.transport.close()
        else:
            self._unused_check = self.loop.call_later(left_s, self._check_unused)

    def _schedule_check(self) -> None:
        """Check the connection at the deadline. Bytes that arrive before it do not move it."""
        if self._deadline is None:
            self._deadline = self.loop.time() + (IDLE_S if self._between_requests else REST_S)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        """Close the connection if nothing, or too little, has arrived while the server read it."""
        if self.transport.is_closing():
            return
        if self._refused_bytes is not None:
            self.transport.abort()
            return
        is_arriving = self._body_bytes - self._body_bytes_at_last_check >= LEAST_BYTES or self._was_paused
        if not self.flow.read_paused and (self._between_requests or self._in_head or not is_arriving):
            self.transport.abort()
            return
        self._body_bytes_at_last_check = self._body_bytes
        self._was_paused, self._deadline = self.flow.read_paused, None
        self._schedule_check()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: clients could fill the log. The request is answered without an upgrade, as the last of its
        connection: the parser has dropped what came behind it."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        if len(self.headers) >= MOST_HEADERS:
            self._refuse(431, f"a request may have {MOST_HEADERS} headers")
        else:
            self._refuse(400, "the request is not HTTP/1.1 as this server accepts it")

    def _refuse(self, status: int, detail: str) -> None:
        """Close the connection. Answer first, unless the client would read the answer as that to another request."""
        if self._may_answer():
            body = msgspec.json.encode({"detail": detail, "field": None})
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether the refused request is the next to be answered, and none of its answer has been sent."""
        if self._between_requests or self._in_head:  # it comes after the requests that are running
            return self.cycle is None or self.cycle.response_complete
        return not self.pipeline and self.cycle is not None and not self.cycle.response_started


class BufferedRequests(BoundedHttp, ABC):
    """`takes` is asked at the end of each head that may be handled as a whole: HTTP/1.1, no request before it that is
    unanswered, no upgrade, no `Expect`. After the body has come, `start` gets it, and makes the object that
    stands in the place of uvicorn's cycle."""

    parser: httptools.HttpRequestParser  # type: ignore[assignment]  # None only after the connection is lost

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._collects = False
        """The body of a request that `takes` has accepted is arriving."""
        self._body: list[bytes] = []

    @abstractmethod
    def takes(self) -> bool:
        """Whether `start` shall get this request: its head is in `headers`, `url` and the parser. Refuse bodies
        larger than may be held before the key is checked."""

    @abstractmethod
    def start(self, body: bytes) -> bool:
        """Start the request. False: it must go to uvicorn after all."""

    def on_message_begin(self) -> None:
        self._between_requests, self._in_head, self._deadline = False, True, None
        self.url, self.expect_100_continue, self.headers = b"", False, []

    def on_headers_complete(self) -> None:
        self._in_head, self._deadline = False, None
        if (
            (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and not self.transport.is_closing()
            and self.parser.get_http_version() == "1.1"
            and not self.parser.should_upgrade()
            and self.takes()
        ):
            self._collects, self._body = True, []
        else:
            self._to_asgi()

    def _to_asgi(self) -> None:
        headers, url, expect = self.headers, self.url, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)
        self.headers.extend(headers)
        self.url, self.expect_100_continue = url, expect
        HttpToolsProtocol.on_headers_complete(self)
        self.headers = []  # for trailers, as in BoundedHttp

    def on_body(self, body: bytes) -> None:
        if not self._collects:
            super().on_body(body)
            return
        self._bytes_beside_body -= len(body)
        self._body_bytes += len(body)
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._collects:
            super().on_message_complete()
            return
        self._collects = False
        self._between_requests, self._deadline = True, None
        self._bytes_beside_body = self._body_bytes = self._body_bytes_at_last_check = 0
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        if not self.start(body):
            self.hand_over(body, more=False)

    def hand_over(self, body: bytes, *, more: bool) -> None:
        """Give the request to uvicorn after all. `body`: what has come of it."""
        self._to_asgi()
        self.cycle.body += body
        self.cycle.more_body = more
        self.cycle.message_event.set()

    def _may_answer(self) -> bool:
        return self._collects or super()._may_answer()

    def shutdown(self) -> None:
        """A request that is still arriving is answered, too: uvicorn would know nothing of it."""
        if self._collects:
            self._collects = False
            self.hand_over(b"".join(self._body), more=True)
            self._body = []
        super().shutdown()


def whole_answer(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, keep_alive: bool) -> bytes:
    """An answer as it goes to the client. `headers` has the body's length. Raises ValueError for a value that would end
    its header's line."""
    parts = [STATUS_LINE[status]]
    for name, value in headers:
        if HEADER_VALUE_RE.search(value):
            raise ValueError(f"the value of the header {name.decode()} holds a control character")
        parts += (name, b": ", value, b"\r\n")
    parts += (b"\r\n" if keep_alive else b"connection: close\r\n\r\n", body)
    return b"".join(parts)
