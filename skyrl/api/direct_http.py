"""The two requests of a sample, `asample` and `retrieve_future`, without uvicorn's way through ASGI: a small request
goes to the HTTP table when its body has arrived, and its answer is one write.

The hooks, the handlers and all other routes see no difference. docs/decisions/sample-path.md has the figures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, MutableMapping
from functools import partial
from typing import Any, NoReturn

from skyrl.api.bodies import SMALL_BYTES
from skyrl.api.call import IncomingHeaders
from skyrl.api.table import LONG_POLLS, HttpTable
from skyrl.http.server import BufferedRequests, whole_answer
from skyrl.http.shared_memory import UnreadAnswers
from skyrl.runtime.processes.turns import Turns

logger = logging.getLogger(__name__)

SHORT_WAY = ("/api/v1/asample", "/api/v1/retrieve_future")
MOST_UNREAD_BYTES = 512 * 2**20
"""Of answers that their clients have not taken: else they could have any number of large results in memory."""
SAMPLES_PER_TURN, POLLS_PER_TURN = 16, 64
"""How many samples are taken, and how many long polls begin or are cut off, in one turn of the event loop: some
milliseconds. A client may send thousands of samples at once, and all polls come again at once when a proxy restarts;
heartbeats should not wait behind them."""
_ASGI = {"version": "3.0", "spec_version": "2.3"}
_FAILED = b"Internal Server Error"
_FAILED_HEADERS = ((b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(_FAILED)))


class DirectRequest:
    """One request whose body has arrived. Stands where uvicorn keeps the request that runs on a connection, and has the
    attributes that uvicorn and `BoundedHttp` use there."""

    __slots__ = (
        "_connection", "body", "disconnected", "held", "keep_alive", "received", "response_complete",
        "response_started", "whole_body",
    )  # fmt: skip

    def __init__(self, connection: DirectHttp, body: bytes) -> None:
        self._connection = connection
        self.received = connection.received
        self.whole_body = body
        self.keep_alive = connection.parser.should_keep_alive()
        self.response_started = self.response_complete = False
        self.disconnected = False
        """Set by the connection when the client has gone."""
        self.body = b""
        self.held: asyncio.Task[None] | None = None
        """The task of a long poll. It ends when the client has gone: one that a proxy has cut off asks again on another
        connection, and its old polls would pile up."""

    @property
    def message_event(self) -> DirectRequest:
        """A property, because an attribute would be a cycle, which only the garbage collector frees."""
        return self

    def set(self) -> None:
        """uvicorn calls this, as that of its event, when the connection is lost. Except for a long poll the
        handler goes on, and its answer goes nowhere: what it records has been sent."""
        if (held := self.held) is not None:
            self.held = None
            self._connection.polls.add(held.cancel)

    def begin(self, scope: dict[str, Any]) -> None:
        """Give the request to the table in a task of its own."""
        connection = self._connection
        is_poll = scope["path"] in LONG_POLLS
        if is_poll and self.disconnected:  # while others began
            self._part()
            return
        task = connection.loop.create_task(self.run(connection.table, scope))
        if is_poll:
            self.held = task
        connection.tasks.add(task)
        task.add_done_callback(connection.tasks.discard)

    async def receive(self) -> NoReturn:
        """In the place of ASGI's `receive`."""
        raise RuntimeError("the body of this request has been read")

    async def send(self, message: MutableMapping[str, Any]) -> NoReturn:
        """In the place of ASGI's `send`."""
        raise RuntimeError(f"this route has only whole answers, and one of them is no BytesResponse: {message['type']}")

    async def run(self, table: HttpTable, scope: dict[str, Any]) -> None:
        """Give the request to the table. An error that the table does not answer ends the connection, as in uvicorn."""
        try:
            await table(scope, self.receive, self.send)
        except asyncio.CancelledError:  # the server is about to end, or the client of a long poll has gone
            self._break_off()
            raise
        except Exception:  # no handler answered it: the log has it, and the connection breaks off
            logger.exception("a request ended without an answer")
            self._break_off()
        else:
            if not self.response_complete and not self.disconnected:
                logger.error("a request to %s ended without an answer", scope["path"])
                self._break_off()
        finally:
            del self.received, self.whole_body  # the connection keeps the request until the next one
            self.held = None
            if self.disconnected:
                self._part()

    def _part(self) -> None:
        """The connection is lost. Request and connection know each other, so only the garbage collector would free
        both."""
        self._connection.cycle = self._connection._running = None  # type: ignore[assignment]

    def _break_off(self) -> None:
        transport = self._connection.transport
        if not self.response_started and not self.disconnected:
            transport.write(whole_answer(500, _FAILED_HEADERS, _FAILED, keep_alive=False))
        self.response_started = self.response_complete = True
        transport.close()

    async def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send head and body at once. `headers` has the body's length. Nothing is sent to a client that has gone."""
        connection = self._connection
        if connection.flow.write_paused and not self.disconnected:
            await connection.flow.drain()
        if self.disconnected:
            return
        all_headers = (*connection.server_state.default_headers, *headers)
        answer = whole_answer(status, all_headers, body, keep_alive=self.keep_alive)
        self.response_started = self.response_complete = True
        connection.transport.write(answer)
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()


class DirectHttp(BufferedRequests):
    """The API's side of a connection."""

    table: HttpTable
    samples: Turns
    polls: Turns
    """All are set once per process, on a subclass: see `protocol_with`."""
    paths = {path.encode(): path for path in SHORT_WAY}
    received: IncomingHeaders
    """The headers of the request whose body is arriving."""

    def takes(self) -> bool:
        """A POST to one of the two paths, with a body that is small and not compressed."""
        if self.url not in self.paths or self.parser.get_method() != b"POST":
            return False
        self.received = IncomingHeaders(self.headers)
        headers = self.received.first
        length = headers.get(b"content-length")
        return (
            length is not None
            and length.isdigit()
            and int(length) <= SMALL_BYTES
            and b"transfer-encoding" not in headers
            and headers.get(b"content-encoding", b"identity") == b"identity"
        )

    def start(self, body: bytes) -> bool:
        request = DirectRequest(self, body)
        del self.received
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers,
            "method": "POST",
            "path": self.paths[self.url],
            "raw_path": self.url,
            "query_string": b"",
            "whole": request,
        }
        self.headers = []  # for trailers, as in BoundedHttp
        self.cycle = self._running = request  # type: ignore[assignment]
        if scope["path"] in LONG_POLLS:
            self.polls.add(partial(request.begin, scope))
        else:
            self.samples.add(partial(request.begin, scope))
        return True


def protocol_with(table: HttpTable) -> type[DirectHttp]:
    """The class of connections for uvicorn."""
    shared = {
        "unread": UnreadAnswers(MOST_UNREAD_BYTES),
        "table": table,
        "samples": Turns(SAMPLES_PER_TURN),
        "polls": Turns(POLLS_PER_TURN),
    }
    return type("ApiConnection", (DirectHttp,), shared)
