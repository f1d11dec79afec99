"""Answers whose whole body is in memory. JSON is encoded once, by msgspec."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


class WholeBody(Response):
    """Starlette's response for a body of bytes, without its general ways to make a body and headers: every sample has
    two of these answers. `media_type` has no text type, whose charset Starlette would add."""

    def __init__(self, body: bytes, media_type: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        if headers is not None:
            super().__init__(body, status, headers, media_type)
            return
        self.body, self.status_code, self.media_type, self.background = body, status, media_type, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type.encode("latin-1"))]


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> WholeBody:
    """A JSON answer. `value` is anything msgspec encodes."""
    return WholeBody(_encoder.encode(value), "application/json", status, headers)


def with_note(answer: Response, note: str | None) -> Response:
    """The answer with a sentence in ASCII for the user, if there is one. The SDK writes the text of this header, and of
    no other, to its user's log."""
    if note is not None:
        answer.headers["x-deprecation-note"] = note
    return answer


def strings(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """User metadata as the SDK reads it back: every value a string."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
