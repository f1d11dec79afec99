"""The two requests of a sample, `asample` and `retrieve_future`, without uvicorn's way through ASGI: a small request
goes to the HTTP table as a whole, and its answer is one write.

The hooks, the handlers and all other routes see no difference. docs/decisions/sample-path.md has the figures.
"""

from __future__ import annotations

from asyncio import Event
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from skyrl.api.body import SMALL_BYTES
from skyrl.api.http_table import HttpTable
from skyrl.web.whole_requests import WholeRequests

SHORT_WAY = ("/api/v1/asample", "/api/v1/retrieve_future")
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class WholeRequest(RequestResponseCycle):
    """One request whose body has arrived. It can do all that uvicorn's cycle can; `answer` is shorter."""

    def __init__(self, connection: DirectHttp, scope: dict[str, Any], body: bytes) -> None:
        super().__init__(
            scope=scope,  # type: ignore[arg-type]  # uvicorn's type has no key of ours
            transport=connection.transport,
            flow=connection.flow,
            logger=connection.logger,
            access_logger=connection.access_logger,
            access_log=connection.access_log,
            default_headers=connection.server_state.default_headers,
            message_event=Event(),
            expect_100_continue=False,
            keep_alive=connection.parser.should_keep_alive(),
            on_response=connection.on_response_complete,
        )
        self.whole_body = body
        self.body += body
        self.more_body = False
        self.message_event.set()

    async def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send an answer with a `Content-Length`, as `send` does in two messages. Nothing is sent to a client that has
        gone."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        parts = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if HEADER_VALUE_RE.search(value):
                raise RuntimeError(f"the answer's header {name.decode()} is not HTTP")
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        parts.append(body)
        self.response_started = self.response_complete = True
        self.transport.write(b"".join(parts))
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


class DirectHttp(WholeRequests):
    """The API's side of a connection."""

    table: HttpTable
    """Set once per process, on a subclass: see `protocol_with`."""
    paths = {path.encode(): path for path in SHORT_WAY}

    def takes(self) -> bool:
        """A POST to one of the two paths, with a body that is small and not compressed."""
        if self.url not in self.paths or self.parser.get_method() != b"POST":
            return False
        headers = dict(reversed(self.headers))  # the first of several counts, as everywhere
        length = headers.get(b"content-length")
        return (
            length is not None
            and length.isdigit()
            and int(length) <= SMALL_BYTES
            and b"transfer-encoding" not in headers
            and headers.get(b"content-encoding", b"identity") == b"identity"
        )

    def start(self, body: bytes) -> bool:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "method": "POST",
            "path": self.paths[self.url],
            "raw_path": self.url,
            "query_string": b"",
        }
        self.cycle = scope["whole"] = request = WholeRequest(self, scope, body)
        self.headers = []  # for trailers, as in BoundedHttp
        self._start_asgi_task(request, self.table)  # type: ignore[arg-type]
        return True


def protocol_with(table: HttpTable) -> type[DirectHttp]:
    """The class of connections for uvicorn."""
    return type("ApiConnection", (DirectHttp,), {"table": table})
