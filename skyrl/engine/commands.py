"""A command as the engine queues it, without its body; and what a barrier leaves when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from skyrl.types.kinds import PASSES, Kind
from skyrl.types.weights import AdapterVersion

Change = Callable[[Connection], object]
"""What belongs into the transaction of a command's result."""


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command log. `n` is its place by arrival, `size` its body's length in bytes. It is not to start
    `not_before`, in seconds since the epoch."""

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


def command_of(row: Any) -> Command:
    """From a row of `skyrl.db.futures.pending` or `executed`."""
    return Command(
        row.n,
        row.id,
        Kind(row.kind),
        row.tenant,
        row.session_id,
        row.model_id,
        row.seq_id,
        row.sampling_session_id,
        row.sample_seq_id,
        row.body_format,
        row.size or 0,
        row.not_before,
    )


@dataclass(frozen=True)
class Done:
    """The outcome of a barrier: the JSON result, what else belongs into its transaction, and a new adapter version for
    the inference servers."""

    result: dict[str, Any]
    change: Change | None = None
    adapter: AdapterVersion | None = None
