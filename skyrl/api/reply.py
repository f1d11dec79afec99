"""JSON answers, encoded once, by msgspec."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer. `value` is anything msgspec encodes."""
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def strings(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """User metadata as the SDK reads it back: every value a string."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
