"""What a dialect does: it turns a request into a chat completion's, and the answer back.

`chat` below is always OpenAI's chat completions, as `skyrl.server.openai` checks and forwards them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl.base.wire.errors import RequestError


class Speaker(Protocol):
    """Writes one answer in a dialect. Lives as long as one request."""

    def whole(self, answer: bytes) -> bytes:
        """The body for a whole chat completion."""
        ...

    def events(self, chunk: bytes) -> bytes:
        """The framed events for one chunk of a streamed chat completion; empty if it gives none."""
        ...

    def end(self) -> bytes:
        """The framed events after the last chunk."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """The framed events with which a stream ends that has failed after its first event."""
        ...


@dataclass(frozen=True, slots=True)
class Spoken:
    """A request as a chat completion: its fields, `model`, `messages` and `stream` among them. `left_out` says in a
    sentence each what of the request has no effect, such as a tool that this server cannot serve."""

    chat: dict[str, Any]
    speaker: Speaker
    left_out: tuple[str, ...] = field(default=())
