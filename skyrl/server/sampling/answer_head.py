"""What the forwarding path reads from the headers of an answer. Does not know connections."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime

from skyrl.server.sampling.transport import WORKER_HEADER


class AnswerHead:
    """`has_length`: whether a header tells where the answer ends, by its length or because it comes in chunks.
    `worker`: the URL of the replica that the answer is about, if a router names it."""

    __slots__ = ("content_length", "content_type", "has_length", "retry_after_s", "worker")

    def __init__(self) -> None:
        self.content_type = ""
        self.content_length = 0
        self.retry_after_s: float | None = None
        self.worker: str | None = None
        self.has_length = False

    def add(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1").partition(";")[0].strip()
        elif name in (b"content-length", b"transfer-encoding"):
            self.has_length = True
            if name == b"content-length" and value.isdigit():
                self.content_length = int(value)
        elif name == b"retry-after":
            self.retry_after_s = _parse_retry_after(value)
        elif name == WORKER_HEADER:
            self.worker = value.decode("latin-1")


def _parse_retry_after(header: bytes) -> float | None:
    """Seconds from now. The header is a number or a date; None for anything else."""
    text = header.decode("latin-1")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
