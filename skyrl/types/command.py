"""A command of the engine without its body, and a command that has run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyrl.types.kinds import PASSES, Kind


@dataclass(frozen=True, slots=True)
class Command:
    """One request for the engine. `n` is its place by arrival, `size` the length of its body in bytes. It must not
    start before `not_before` (seconds since the epoch)."""

    n: int
    request_id: str
    kind: Kind
    tenant: str
    session_id: str
    model_id: str | None
    seq_id: int | None
    sampling_session_id: str | None
    sample_seq_id: int | None
    body_format: str
    size: int
    not_before: float | None = None

    @property
    def is_pass(self) -> bool:
        return self.kind in PASSES


@dataclass(frozen=True, slots=True)
class ExecutedCommand:
    """A command that has changed its model. `status` is `done`, or `failed` for an optimizer step that failed by its
    caller's fault. `completed_at` is when the outcome was stored, in seconds since the epoch."""

    command: Command
    status: Literal["done", "failed"]
    completed_at: float
