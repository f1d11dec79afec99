"""Usage by hour: tokens trained and sampled, checkpoints made, gigabyte-hours stored. Amounts only; no prices.

Rows are sums: counting is adding, in the transaction of what is counted wherever one process does both. Which project
a session belongs to is looked up when somebody asks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, func, insert, or_, select, text, update

from skyrl.db.database import Database
from skyrl.db.sessions import in_project, sessions
from skyrl.db.tables import CheckpointRow, MeterRow, ModelRow, UsageRow
from skyrl.db.writer import GroupCommitWriter

usage = UsageRow.__table__  # type: ignore[attr-defined]
_meters = MeterRow.__table__  # type: ignore[attr-defined]
_models = ModelRow.__table__  # type: ignore[attr-defined]
_checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]

_COUNTER = "samples "
"""What the names of meters of samples begin with."""
HOUR_S = 3600
GIGABYTE = 10**9


class UsageKind(StrEnum):
    """What is counted: tokens, but for checkpoints (how many) and storage (gigabyte-hours)."""

    TRAINING = "training"
    PREFILL = "sampling_prefill"
    PREFILL_CACHED = "sampling_prefill_cached"
    SAMPLE = "sampling_sample"
    CHECKPOINT = "checkpoint"
    STORAGE = "storage"


class UsageKey(NamedTuple):
    """Whose amount of what. `bucket` is the start of an hour in UTC, in seconds; `session_id` is empty for storage."""

    tenant: str
    bucket: int
    session_id: str
    base_model: str
    kind: UsageKind


_ADD = text(
    "INSERT INTO usage (tenant, bucket, session_id, base_model, kind, amount) "
    "VALUES (:tenant, :bucket, :session_id, :base_model, :kind, :amount) "
    "ON CONFLICT (tenant, bucket, session_id, base_model, kind) DO UPDATE SET amount = usage.amount + excluded.amount"
)


def bucket_of(seconds: float) -> int:
    return int(seconds // HOUR_S) * HOUR_S


def add(connection: Connection, amounts: Mapping[UsageKey, float]) -> None:
    """Add to the sums, in one order for all writers so that none waits for another in a ring."""
    rows = [key._asdict() | {"amount": amount} for key, amount in sorted(amounts.items()) if amount]
    if rows:
        connection.execute(_ADD, rows)


def count_training(connection: Connection, tokens: Mapping[str, int]) -> None:
    """Count tokens of training passes, by model id."""
    query = select(_models.c.id, _models.c.tenant, _models.c.session_id, _models.c.base_model)
    bucket = bucket_of(time.time())
    counted: dict[UsageKey, float] = {}
    for row in connection.execute(query.where(_models.c.id.in_(tokens))):
        key = UsageKey(row.tenant, bucket, row.session_id, row.base_model, UsageKind.TRAINING)
        counted[key] = counted.get(key, 0) + tokens[row.id]
    add(connection, counted)


def count_checkpoint(connection: Connection, tenant: str, session_id: str, base_model: str) -> None:
    """Count one checkpoint made."""
    add(connection, {UsageKey(tenant, bucket_of(time.time()), session_id, base_model, UsageKind.CHECKPOINT): 1})


def sample_amounts(
    tenant: str, session_id: str, base_model: str, *, prompt: int, cached: int, sampled: int
) -> dict[UsageKey, int]:
    """Tokens of one sample request: its prompt, the part of it that was cached, what all its sequences hold."""
    bucket = bucket_of(time.time())
    amounts = (
        (UsageKind.PREFILL, prompt - cached),
        (UsageKind.PREFILL_CACHED, cached),
        (UsageKind.SAMPLE, sampled),
    )
    return {UsageKey(tenant, bucket, session_id, base_model, kind): amount for kind, amount in amounts}


def meter_storage(connection: Connection, now: float) -> None:
    """Count what live checkpoints have taken since this was last called, times when no server ran included.

    The first call ever only starts the clock. A checkpoint deleted between two calls is counted up to the first.
    """
    meter = _meters.c.name == UsageKind.STORAGE
    since = connection.execute(select(_meters.c.counted_until).where(meter)).scalar()
    if since is None:
        connection.execute(insert(_meters), {"name": UsageKind.STORAGE, "counted_until": now})
        return
    if now <= since:  # the clock was set back
        return
    rows = connection.execute(
        select(_checkpoints).where(
            _checkpoints.c.created_at < now,
            or_(_checkpoints.c.expires_at.is_(None), _checkpoints.c.expires_at > since),
        )
    )
    amounts: dict[UsageKey, float] = {}
    for row in rows:
        start, end = max(since, row.created_at), min(now, row.expires_at or now)
        while start < end:
            bucket = bucket_of(start)
            part = min(end, bucket + HOUR_S) - start
            key = UsageKey(row.tenant, bucket, "", row.base_model, UsageKind.STORAGE)
            amounts[key] = amounts.get(key, 0) + row.size_bytes / GIGABYTE * part / HOUR_S
            start += part
    add(connection, amounts)
    connection.execute(update(_meters).where(meter).values(counted_until=now))


def add_once(connection: Connection, counter: str, at: float, amounts: Mapping[UsageKey, float]) -> None:
    """Add what `counter` counted until `at`, unless that is in the sums already: it is repeated when the answer to its
    commit was lost. A counter that was silent for a day is forgotten."""
    row = _meters.c.name == _COUNTER + counter
    until = connection.execute(select(_meters.c.counted_until).where(row)).scalar()
    if until == at:
        return
    if until is None:
        silent = (_meters.c.name.startswith(_COUNTER), _meters.c.counted_until < at - 24 * HOUR_S)
        connection.execute(delete(_meters).where(*silent))
        connection.execute(insert(_meters), {"name": _COUNTER + counter, "counted_until": at})
    else:
        connection.execute(update(_meters).where(row).values(counted_until=at))
    add(connection, amounts)


class UsageCounter:
    """Counts samples in memory, so that the way of a sample has no second write; `flush` adds them to the table.

    Flushed every second and when the process stops: one that is killed loses what it counted since.
    """

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer
        self._name = secrets.token_hex(8)
        self._amounts: dict[UsageKey, float] = {}
        self._unsure: tuple[float, dict[UsageKey, float]] | None = None
        """What a flush that failed was to add, which may be there all the same; and until when it was counted."""

    def count(self, amounts: Mapping[UsageKey, float]) -> None:
        for key, amount in amounts.items():
            self._amounts[key] = self._amounts.get(key, 0) + amount

    async def flush(self) -> None:
        while self._unsure is not None or self._amounts:
            if self._unsure is None:
                self._unsure, self._amounts = (time.time(), self._amounts), {}
            flushed = self._unsure
            await self._writer.transact(partial(add_once, counter=self._name, at=flushed[0], amounts=flushed[1]))
            if self._unsure is flushed:  # another flush may have been faster
                self._unsure = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Live checkpoints of one project (None: of sessions in none)."""

    project_id: str | None
    checkpoints: int
    size_bytes: int


class Usage:
    """What a tenant has used."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def between(self, tenant: str, start: datetime, end: datetime) -> tuple[list[Any], dict[str, Any]]:
        """Rows of the hours in [start, end), by hour and then the largest amounts first; and the sessions rows that
        they name, by id."""
        wanted = (
            usage.c.tenant == tenant,
            usage.c.bucket >= int(start.astimezone(UTC).timestamp()),
            usage.c.bucket < int(end.astimezone(UTC).timestamp()),
        )
        query = select(usage).where(*wanted).order_by(usage.c.bucket, usage.c.amount.desc(), usage.c.kind)
        named = select(sessions).where(sessions.c.id.in_(select(usage.c.session_id).where(*wanted)))
        return await self._database.read_async(
            lambda c: (list(c.execute(query)), {row.id: row for row in c.execute(named)})
        )

    async def stored(self, tenant: str, project_id: str | None = None) -> list[Stored]:
        """What live checkpoints take now, by project; of one project if it is named."""
        live = or_(_checkpoints.c.expires_at.is_(None), _checkpoints.c.expires_at > time.time())
        query = (
            select(sessions.c.project_id, func.count().label("n"), func.sum(_checkpoints.c.size_bytes).label("size"))
            .select_from(_checkpoints)
            .join(_models, _models.c.id == _checkpoints.c.model_id, isouter=True)
            .join(sessions, sessions.c.id == _models.c.session_id, isouter=True)
            .where(_checkpoints.c.tenant == tenant, live)
            .group_by(sessions.c.project_id)
            .order_by(sessions.c.project_id)
        )
        if project_id is not None:
            query = query.where(in_project(project_id))
        return await self._database.read_async(
            lambda c: [Stored(row.project_id, row.n, int(row.size)) for row in c.execute(query)]
        )
