"""Starlette's request, with headers that are found in a dictionary: a sample's two requests look up eleven headers, and
Starlette searches all that the client has sent each time."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

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
