"""How completion requests travel: what the forwarding client asks of a transport, and how one can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

CONTROL_ANSWER_BYTES = 2**20
"""The bound of an answer where its caller gives none (health, a load), and of all that are not 2xx."""


class NotAccepted(Exception):
    """The request cannot have reached the server: nobody was listening, or the address is wrong."""


class Interrupted(Exception):
    """The connection broke after the request was sent; whether it was processed is unknown."""


def _nothing() -> None:
    """Most answers take no room that somebody waits for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. `whole` is False when it was longer than its bound: then `body` is only how it began.

    A large answer occupies room that other large answers wait for. Call `release` once its body is not needed any
    more; calling it again, or for a small answer, does nothing.
    """

    status: int
    content_type: str
    body: bytes
    retry_after_s: float | None = None
    whole: bool = True
    release: Callable[[], None] = field(default=_nothing, compare=False, repr=False)


class CompletionTransport(Protocol):
    """Sends a request, returns the answer. Raises NotAccepted or Interrupted, nothing else.

    `max_bytes` bounds the body of a 2xx answer. The transport reads no more than that into memory, and closes the
    connection of an answer that is longer.

    A caller that is cancelled closes its connection, which is how vLLM learns that nobody waits any more."""

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer: ...

    async def get(
        self, url: str, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer: ...

    async def close(self) -> None: ...
