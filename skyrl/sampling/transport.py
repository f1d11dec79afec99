"""How completion requests travel: what the forwarding client asks of a transport, and how one can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class NotAccepted(Exception):
    """The request cannot have reached the server: nobody was listening, or the address is wrong."""


class Interrupted(Exception):
    """The connection broke after the request was sent; whether it was processed is unknown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, whole."""

    status: int
    content_type: str
    body: bytes
    retry_after_s: float | None = None


class CompletionTransport(Protocol):
    """Sends a request, returns the whole answer. Raises NotAccepted or Interrupted, nothing else.

    A caller that is cancelled closes its connection, which is how vLLM learns that nobody waits any more."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Answer: ...

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Answer: ...

    async def close(self) -> None: ...
