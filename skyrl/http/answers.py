"""An HTTP answer. Knows no connection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import msgspec

from skyrl.http.connection import HeaderList

WORKER_HEADER = b"x-skyrl-worker"
"""A header of skyrl's router: the URL of the replica that an answer is about."""


def header_of(headers: HeaderList, name: bytes) -> str | None:
    """The value of the first header `name`, which is in lower case."""
    return next((value.decode("latin-1") for given, value in headers if given == name), None)


def content_type_of(headers: HeaderList) -> str:
    """Without parameters; empty if there is none."""
    return (header_of(headers, b"content-type") or "").partition(";")[0].strip()


def hold_nothing() -> None:
    """The `release` of an answer without reserved memory."""


# Every sample makes one. As a frozen dataclass that would take three times as long.
class Answer(msgspec.Struct, frozen=True):
    """An HTTP answer. The names of its headers are in lower case. `whole` is False if it exceeded its bound; then
    `body` has only its beginning.

    A large answer holds memory for which other large answers wait. Call `release` when the body is not needed any more.
    A second call does nothing, nor does a call for a small answer.
    """

    status: int
    body: bytes
    headers: HeaderList = []
    whole: bool = True
    release: Callable[[], None] = hold_nothing

    @property
    def content_type(self) -> str:
        return content_type_of(self.headers)

    @property
    def worker(self) -> str | None:
        """The URL of the replica that the answer is about, if a router names it."""
        return header_of(self.headers, WORKER_HEADER)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds from now. The header is a number or a date; None for anything else."""
        text = header_of(self.headers, b"retry-after")
        if text is None:
            return None
        try:
            seconds = float(text)
        except ValueError:
            try:
                seconds = parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, OverflowError):
                return None
        return max(0.0, seconds) if math.isfinite(seconds) else None


LARGE_ANSWER_BYTES = 2**20
"""The rest of a larger answer is only read after memory was reserved for the answer."""


MEMORY_BYTES = 256 * 2**20
"""For all large answers of a client, each until it is decoded. An answer larger than this is read while no other large
answer is in memory."""
