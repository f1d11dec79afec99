"""The API's side of a connection: uvicorn's, with bounds for what comes before a request is whole.

Nobody has shown a key by then. uvicorn's parser keeps a head or a trailer of any length, and its connections wait for
ever for a first request, or for the rest of one. Knows bytes and time; does not know routes.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 64 * 2**10
"""What a request may have beside its body: request line, headers, trailers, the frames of its chunks."""
FRAMES_SHARE = 16
"""And this part of the body more, for a long body has many chunks."""
IDLE_S = 75.0
"""How long a connection may bring no request: as long as one that has brought some is kept."""
REST_S = 30.0
"""A head must be whole after so long; not while nobody reads it, behind requests that are not answered yet."""
LEAST_BYTES = 64 * 2**10
"""What a body must bring in each REST_S, or end; not while nobody reads it."""
SPARE_DESCRIPTORS = 1024
"""Files and sockets that connections leave for the database and the inference server; at most a quarter of all."""


def most_connections() -> int:
    """As many as the limit of open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files - min(SPARE_DESCRIPTORS, files // 4)


class BoundedHttp(HttpToolsProtocol):
    """A request that comes whole with its connection's next bytes, as nearly all do, pays for two comparisons."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._between = True
        """No part of a request is there."""
        self._in_head = False
        self._beside = 0
        self._body = 0
        self._counted = 0
        self._waited = False
        self._until: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= most_connections():
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._beside += len(data)
        super().data_received(data)
        if self._between and self.cycle is not None and not self.cycle.response_complete:
            return
        if self.transport.is_closing():
            return
        if self._beside > HEAD_BYTES + self._body // FRAMES_SHARE:
            self._refuse(431, f"a request may have {HEAD_BYTES} bytes beside its body")
        else:
            self._expect_more()

    def on_message_begin(self) -> None:
        self._between, self._in_head, self._until = False, True, None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._until = False, None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside -= len(body)
        self._body += len(body)
        super().on_body(body)
        self._waited = self._waited or self.flow.read_paused

    def on_message_complete(self) -> None:
        self._between, self._until = True, None
        self._beside = self._body = self._counted = 0
        super().on_message_complete()

    def _expect_more(self) -> None:
        """Close the connection if what is missing does not come in time; what came does not move the end."""
        if self._until is None:
            self._until = self.loop.time() + (IDLE_S if self._between else REST_S)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_at(self._until, self._overdue)

    def _overdue(self) -> None:
        if self.transport.is_closing():
            return
        comes = self._body - self._counted >= LEAST_BYTES or self._waited
        if not self.flow.read_paused and (self._between or self._in_head or not comes):
            self.transport.abort()
            return
        self._counted, self._waited, self._until = self._body, self.flow.read_paused, None
        self._expect_more()

    def _unsupported_upgrade_warning(self) -> None:
        """Whoever asks for one could fill the log; the request is answered without."""

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not HTTP/1.1 as this server takes it")

    def _refuse(self, status: int, detail: str) -> None:
        """Close the connection; and answer first, unless the client would take it for the answer to another request."""
        if self._may_answer():
            body = msgspec.json.encode({"detail": detail, "field": None})
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether the request at fault is the next to be answered, and nothing was said to it."""
        if self._between or self._in_head:  # it is a new one, after those that run
            return self.cycle is None or self.cycle.response_complete
        return not self.pipeline and self.cycle is not None and not self.cycle.response_started
