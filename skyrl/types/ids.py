"""Request ids: opaque strings, ordered by time and unguessable, made in the process without a round trip."""

from __future__ import annotations

import secrets
import time


def new_request_id() -> str:
    """48 bits of milliseconds since the epoch, then 96 random bits, in hex (36 characters)."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(12)}"


def new_session_id() -> str:
    """Unguessable and free of '/' and ':', which separate the parts of model ids and paths."""
    return f"s{new_request_id()}"


def sample_sequence_ids(request_id: str, num_samples: int) -> list[str]:
    """One id per sequence of a sample request; a repeated request gets the same ones."""
    return [f"{request_id}-{index}" for index in range(num_samples)]
