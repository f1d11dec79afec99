"""Starlette's request, with headers that are found in a dictionary: a sample's two requests look up eleven headers, and
Starlette searches all that the client has sent each time."""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

T = TypeVar("T")


class IncomingHeaders(Headers):
    """Case-insensitive, as Starlette's. The first of several headers with one name counts."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._first = dict(reversed(raw))

    def get(self, key: str, default: T = None) -> str | T:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower().encode("latin-1")].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first


class IncomingRequest(Request):
    @cached_property
    def headers(self) -> IncomingHeaders:  # pyright: ignore[reportIncompatibleMethodOverride]
        return IncomingHeaders(self.scope["headers"])
