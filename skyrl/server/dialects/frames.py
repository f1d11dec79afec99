"""Server-sent events that have a name."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


def named_event(name: str, content: dict[str, Any]) -> bytes:
    """The frame of an event, whose `type` in the content is its name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **content}))
