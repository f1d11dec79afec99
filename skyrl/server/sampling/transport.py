"""The transport of the forwarding client: its interface, its answer, and its two failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import msgspec

CONTROL_ANSWER_BYTES = 2**20
"""The bound of answers that are not 2xx, and of answers for which the caller gives no bound (health, adapter loads)."""


WORKER_HEADER = b"x-skyrl-worker"
"""A header of skyrl's router: the URL of the replica that an answer is about."""


class NotAccepted(Exception):
    """The request did not reach the server: no connection was made, or the address is wrong."""


class Interrupted(Exception):
    """The connection broke after the request was sent. The server may have processed the request."""


def _hold_nothing() -> None:
    """The `release` of an answer without reserved memory."""


# Every sample makes one. As a frozen dataclass that would take three times as long.
class Answer(msgspec.Struct, frozen=True):
    """An HTTP answer. `whole` is False if it exceeded its bound; then `body` has only its beginning. `worker` is the
    URL of the replica that the answer is about, if a router names it.

    A large answer holds memory for which other large answers wait. Call `release` when the body is not needed any more.
    A second call does nothing, nor does a call for a small answer.
    """

    status: int
    content_type: str
    body: bytes
    retry_after_s: float | None = None
    whole: bool = True
    worker: str | None = None
    release: Callable[[], None] = _hold_nothing


class Pieces(msgspec.Struct):
    """The end of a long body, which is made while it is sent. `size`: the bytes of all pieces together."""

    size: int
    pieces: Iterator[bytes]


class CompletionTransport(Protocol):
    """Sends a request and returns the answer. Raises only NotAccepted and Interrupted.

    The body of a post is `body`, followed by the pieces of `rest`. They are taken no faster than the server reads, and
    not to their end if the server answers before.

    `max_bytes` bounds the body of a 2xx answer. The transport reads no more than that into memory, and closes the
    connection if the answer is longer.

    If a caller is cancelled, its connection is closed; so vLLM learns that the answer is not needed."""

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        max_bytes: int = CONTROL_ANSWER_BYTES,
        rest: Pieces | None = None,
    ) -> Answer: ...

    async def get(
        self, url: str, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer: ...

    async def close(self) -> None: ...
