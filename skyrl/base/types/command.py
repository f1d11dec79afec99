"""A command for the engine without its body, and a command that the engine has executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyrl.base.types.kinds import PASSES, Kind


@dataclass(frozen=True, slots=True)
class Command:
    """One request for the engine. `n` is its number in the order of arrival. `size` is the length of its body in bytes.
    It was recorded at `accepted_at`, and the engine must not start it before `not_before` (both in seconds since the
    epoch)."""

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
    accepted_at: float = 0.0
    trace: str | None = None
    """The `traceparent` of the request that recorded it; None if it is not traced."""

    @property
    def is_pass(self) -> bool:
        return self.kind in PASSES


@dataclass(frozen=True, slots=True)
class ExecutedCommand:
    """A command that has changed its model. `status` is `failed` only for an optimizer step that failed because of its
    caller's mistake. `completed_at` is when the outcome was stored, in seconds since the epoch."""

    command: Command
    status: Literal["done", "failed"]
    completed_at: float
