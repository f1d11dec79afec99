"""Request and session ids: unguessable, ordered by time, and made without asking the database."""

from __future__ import annotations

import os
import time


def new_request_id() -> str:
    """48 bits of milliseconds since the epoch, then 96 random bits, in hex (36 characters)."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(12).hex()}"


def new_session_id() -> str:
    """Contains no '/' and no ':', because these separate the parts of model ids and of paths."""
    return f"s{new_request_id()}"


def sample_sequence_ids(request_id: str, num_samples: int) -> list[str]:
    """One id for each sequence of a sample request. A repeat of the request gets the same ids."""
    return [f"{request_id}-{index}" for index in range(num_samples)]
