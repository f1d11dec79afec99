"""Where a sample stands that this process forwards: sent to the inference server, or what it waits for before that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SampleWait(StrEnum):
    """What a sample waits for before it is sent (again)."""

    AWAY = "away"
    """The inference server."""
    BUSY = "busy"
    """The inference server, which answers 429."""
    LOADING = "loading"
    """The load of its adapter into the inference server."""
    SUSPECTS = "suspects"
    """Other samples that were interrupted as often: they are sent a few at a time."""


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """`waits_for` is None while the inference server has the sample. `for_s` is how long it has had it or, if the
    sample waits, how long the sample has waited."""

    waits_for: SampleWait | None
    for_s: float
    has_adapter: bool
    """Whether the sample comes from an adapter."""
