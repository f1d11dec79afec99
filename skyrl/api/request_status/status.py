"""The answer to "stuck or queued?", and how its numbers are written. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]
"""Tinker's words. The SDK logs the sentence for the two paused states alone."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """`state` is the same for as long as a model or a sampler waits for the same thing: the SDK counts time from the
    last change of the state. `sentence` begins with a small letter and ends without a full stop, because the SDK writes
    it into a sentence of its own. Neither names another tenant."""

    state: QueueState
    sentence: str


def active(sentence: str) -> RequestStatus:
    """The request is being worked on."""
    return RequestStatus("active", sentence)


def paused(sentence: str) -> RequestStatus:
    """The request waits for something that the server does or lacks."""
    return RequestStatus("paused_capacity", sentence)


def paused_by_quota(sentence: str) -> RequestStatus:
    """The request waits because its tenant's quota is used up."""
    return RequestStatus("paused_rate_limit", sentence)


def duration(seconds: float) -> str:
    """A duration for people: `8 s`, `3 min`, `2.5 h`. At least one second."""
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    if seconds < 120 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """`1 command`, `2 commands`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
