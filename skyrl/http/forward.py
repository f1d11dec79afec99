"""Requests that travel on to another server.

`RequestHead` is what goes on of a request's head, `passed_on` of an answer's head, and `pass_back` passes an answer to
the client as it comes. Knows no route and no policy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from skyrl.http.admin_key import FORWARDING
from skyrl.http.client import AnswerStream
from skyrl.http.connection import HeaderList
from skyrl.http.messages import Send

OWN_HEADERS = frozenset(
    (b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
    + (b"content-length", b"expect", b"proxy-authorization")
)
"""Headers of a connection, not of a request: who passes it on writes those of its own connections."""
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_HOP_BY_HOP_AND_LENGTH = _HOP_BY_HOP | {b"content-length"}
_SMG_KEY, _SESSION_KEY, _LENGTH = b"x-smg-routing-key", b"x-session-id", b"content-length"
_PLAIN = (b"keep-alive", b"close")
_NONE: frozenset[bytes] = frozenset()
_BODY_EXPECTED = (_LENGTH, b"transfer-encoding")
_NOT_IN_VALUE = re.compile(rb"[\r\n\0]")
_NOT_IN_NAME = re.compile(rb"[\0-\x20:\x7f]|^$")
_NOT_IN_TARGET = re.compile(rb"[\0-\x20\x7f]")


class BadHead(ValueError):
    """A header or a target that would end its line, and begin another."""


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises BadHead."""
    for name, value in headers:
        if _NOT_IN_VALUE.search(value) or _NOT_IN_NAME.search(name):
            raise BadHead(f"a header of the request is not HTTP: {name!r}: {value!r}")


def check_target(method: str, target: bytes) -> None:
    """Raises BadHead."""
    if _NOT_IN_NAME.search(method.encode()) or _NOT_IN_TARGET.search(target):
        raise BadHead(f"the request line is not HTTP: {method!r} {target!r}")


def passed_on(status: int, headers: HeaderList) -> HeaderList:
    """The headers of an answer that go on to the client."""
    without = _HOP_BY_HOP_AND_LENGTH if status in (204, 304) else _HOP_BY_HOP
    for name, value in headers:
        if name == b"connection" and value.lower() not in _PLAIN:
            without |= _tokens(value) - {b"content-length"}
    return [header for header in headers if header[0] not in without]


class RequestHead(NamedTuple):
    """What is needed of a request's headers. `lines`: those that go on, as bytes. `length`: of the body; -1 if it is
    not known. `key`: what keeps requests on one worker."""

    lines: bytes
    length: int
    has_body: bool
    key: str | None

    @classmethod
    def of(cls, headers: HeaderList) -> RequestHead:
        lines: list[bytes] = []
        smg_key = session_key = None
        length, has_body, listed = -1, False, _NONE
        for name, value in headers:
            if name in OWN_HEADERS:
                if name in _BODY_EXPECTED:
                    has_body = True
                    if name == _LENGTH and value.isdigit():
                        length = int(value)
                elif name == b"connection" and value.lower() not in _PLAIN:
                    listed |= _tokens(value)
                continue
            if name == _SMG_KEY:
                smg_key = value
            elif name == _SESSION_KEY:
                session_key = value
            lines += (name, b": ", value, b"\r\n")
        if listed:  # `Connection: x-foo` says that x-foo is for this connection alone; marks of proxies stay
            kept = [header for header in headers if header[0] != b"connection"]
            return cls.of([header for header in kept if header[0] not in listed - OWN_HEADERS - FORWARDING])
        key = smg_key or session_key
        return cls(b"".join(lines), length, has_body, key.decode("latin-1") if key else None)


def _tokens(connection: bytes) -> frozenset[bytes]:
    """The names of headers in the value of a Connection header."""
    return frozenset(token.strip() for token in connection.lower().split(b","))


async def pass_back(answer: AnswerStream, headers: HeaderList, send: Send, begun: bytes = b"") -> None:
    """Pass an answer to the client as it comes. `begun`: what was read of its body. Raises Interrupted."""
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    more = True
    while more:
        piece = begun or await answer.read()
        begun, more = b"", not answer.connection.at_end
        await send({"type": "http.response.body", "body": piece, "more_body": more})
