"""A server's side of a connection that hands small requests on as a whole, and all others to uvicorn.

uvicorn starts a request's task when its head is complete. A small body nearly always comes with its head, so a subclass
can treat the whole request at once, at a fraction of the cost. Knows connections; the subclass knows which requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol

from skyrl.runtime.web.connections import BoundedHttp

if TYPE_CHECKING:
    import httptools


class WholeRequests(BoundedHttp, ABC):
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
