"""Usage by hour: tokens trained and sampled, checkpoints made, gigabyte-hours stored. Amounts, no prices.

Counts samples in memory, by run also for the run's open step; `skyrl.storage.db.usage_report` adds the hours up.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, case, delete, func, insert, or_, select, update

from skyrl.base.types.weights import AdapterVersion, FullWeights, WeightsRef
from skyrl.storage.db.database import Database
from skyrl.storage.db.run_steps import SampledSums, Tenanted, add_samples
from skyrl.storage.db.scopes import live
from skyrl.storage.db.sessions import in_project, sessions
from skyrl.storage.db.tables import CheckpointRow, MeterRow, ModelRow, UsageRow
from skyrl.storage.db.writer import GroupCommitWriter

usage = UsageRow.__table__  # type: ignore[attr-defined]
_meters = MeterRow.__table__  # type: ignore[attr-defined]
_models = ModelRow.__table__  # type: ignore[attr-defined]
_checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]

_COUNTER = "samples "
"""Prefix of the names of meters that count samples."""
HOUR_S = 3600
GIGABYTE = 10**9


class UsageKind(StrEnum):
    """What is counted. Units: tokens; the number of checkpoints; gigabyte-hours for storage."""

    TRAINING = "training"
    PREFILL = "sampling_prefill"
    PREFILL_CACHED = "sampling_prefill_cached"
    PREFILL_AGAIN = "sampling_prefill_again"
    """Prompt tokens that were computed again for further sequences of a sample. Not in billing, which counts a prompt
    once."""
    SAMPLE = "sampling_sample"
    CHECKPOINT = "checkpoint"
    STORAGE = "storage"


_STORAGE = _meters.c.name == UsageKind.STORAGE


class UsageKey(NamedTuple):
    """The key of one sum. `bucket` is the start of an hour in UTC, in seconds since the epoch. `session_id` and
    `model_id` may be empty, see `UsageRow`."""

    tenant: str
    bucket: int
    session_id: str
    model_id: str
    base_model: str
    kind: UsageKind


_COLUMNS = ", ".join((*UsageKey._fields, "amount"))
_TYPES = "tenant text, bucket bigint, session_id text, model_id text, base_model text, kind text, amount float8"
_ADD_SQLITE, _ADD_POSTGRES = (
    f"INSERT INTO usage ({_COLUMNS}) {values} ON CONFLICT (tenant, bucket, session_id, model_id, base_model, kind) "
    "DO UPDATE SET amount = usage.amount + excluded.amount"
    for values in (
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        f"SELECT {_COLUMNS} FROM json_to_recordset(%s::json) AS given ({_TYPES})",
    )
)
"""PostgreSQL gets all rows with one statement: the storage of a thousand tenants is added at once."""


def bucket_of(seconds: float) -> int:
    """The start of the hour of a time, both in seconds since the epoch."""
    return int(seconds // HOUR_S) * HOUR_S


def add(connection: Connection, amounts: Mapping[UsageKey, float]) -> None:
    """Add to the sums. All writers add in the same order of keys, so that they cannot deadlock."""
    rows = [(*key[:-1], str(key.kind), amount) for key, amount in sorted(amounts.items()) if amount]
    if rows and connection.dialect.name == "sqlite":
        connection.exec_driver_sql(_ADD_SQLITE, rows)
    elif rows:
        given = [dict(zip((*UsageKey._fields, "amount"), row, strict=True)) for row in rows]
        connection.exec_driver_sql(_ADD_POSTGRES, (json.dumps(given),))


def add_sampled(
    connection: Connection, amounts: Mapping[UsageKey, float], runs: Mapping[Tenanted, SampledSums]
) -> None:
    """Add the amounts of samples to the usage, and their sums by run to the runs' open steps."""
    add(connection, amounts)
    add_samples(connection, runs)


def count_training(connection: Connection, tokens: Mapping[str, int]) -> None:
    """Count the tokens of training passes. `tokens` has the numbers by model id."""
    query = select(_models.c.id, _models.c.tenant, _models.c.session_id, _models.c.base_model)
    bucket = bucket_of(time.time())
    counted: dict[UsageKey, float] = {}
    for row in connection.execute(query.where(_models.c.id.in_(tokens))):
        key = UsageKey(row.tenant, bucket, row.session_id, row.id, row.base_model, UsageKind.TRAINING)
        counted[key] = tokens[row.id]
    add(connection, counted)


def count_checkpoint(connection: Connection, tenant: str, session_id: str, model_id: str, base_model: str) -> None:
    """Count one new checkpoint of the model."""
    key = UsageKey(tenant, bucket_of(time.time()), session_id, model_id, base_model, UsageKind.CHECKPOINT)
    add(connection, {key: 1})


def sample_amounts(
    tenant: str,
    session_id: str,
    base_model: str,
    weights: WeightsRef,
    *,
    prompt: int,
    cached: int,
    sampled: int,
    again: int = 0,
) -> dict[UsageKey, int]:
    """The amounts of one sample request from these weights. `prompt`, `cached` (the cached part of the prompt),
    `sampled` (in all sequences) and `again` (of the prompt, for further sequences) are numbers of tokens."""
    model_id = weights.model_id if isinstance(weights, AdapterVersion | FullWeights) else ""
    keys = _sample_keys(tenant, bucket_of(time.time()), session_id, model_id, base_model)
    return dict(zip(keys, (prompt - cached, cached, again, sampled), strict=True))


@lru_cache(maxsize=1024)
def _sample_keys(
    tenant: str, bucket: int, session_id: str, model_id: str, base_model: str
) -> tuple[UsageKey, UsageKey, UsageKey, UsageKey]:
    """Kept, because the samples of a sampling session have the same keys for an hour."""
    prefill = UsageKey(tenant, bucket, session_id, model_id, base_model, UsageKind.PREFILL)
    return (
        prefill,
        prefill._replace(kind=UsageKind.PREFILL_CACHED),
        prefill._replace(kind=UsageKind.PREFILL_AGAIN),
        prefill._replace(kind=UsageKind.SAMPLE),
    )


@dataclass(frozen=True, slots=True)
class Metered:
    """The storage of live checkpoints between two times, in seconds since the epoch. `since` is None on a database that
    was never metered: then nothing counts."""

    since: float | None
    until: float
    amounts: dict[UsageKey, float]


def metered_storage(connection: Connection, now: float) -> Iterator[Metered]:
    """The storage since the last call of `add_storage` until `now`, hour by hour, each for a transaction of its own:
    time in which no server runs counts, too. Nothing if somebody set the clock back. Reads all checkpoints: call it in
    a read transaction. What it returns reads nothing more.

    A checkpoint that is deleted between two calls is counted until the earlier call.
    """
    since = connection.execute(select(_meters.c.counted_until).where(_STORAGE)).scalar()
    if since is None:
        return iter([Metered(None, now, {})])
    created, expires = _checkpoints.c.created_at, _checkpoints.c.expires_at
    # Most checkpoints live through the whole time: the database adds them up, a row for each tenant and base model.
    group = (
        _checkpoints.c.tenant,
        _checkpoints.c.base_model,
        case((created > since, created)).label("start"),
        case((expires < now, expires)).label("end"),
    )
    rows = connection.execute(
        select(*group, func.sum(_checkpoints.c.size_bytes).label("size"))
        .where(created < now, or_(expires.is_(None), expires > since))
        .group_by(*group)
    )
    return _by_hour(rows.all() if now > since else [], since, now)


def _by_hour(rows: Sequence[Any], since: float, now: float) -> Iterator[Metered]:
    while since < now:
        bucket = bucket_of(since)
        until = min(now, bucket + HOUR_S)
        amounts: dict[UsageKey, float] = {}
        for row in rows:
            lived_s = min(row.end or until, until) - max(row.start or since, since)
            if lived_s > 0:
                key = UsageKey(row.tenant, bucket, "", "", row.base_model, UsageKind.STORAGE)
                amounts[key] = amounts.get(key, 0) + int(row.size) / GIGABYTE * lived_s / HOUR_S
        yield Metered(since, until, amounts)
        since = until


def add_storage(connection: Connection, metered: Metered) -> None:
    """Add what was metered, unless another process has metered the same time."""
    if metered.since is None:
        if connection.execute(select(_meters.c.name).where(_STORAGE)).first() is None:
            connection.execute(insert(_meters), {"name": UsageKind.STORAGE, "counted_until": metered.until})
        return
    same = _STORAGE & (_meters.c.counted_until == metered.since)
    if connection.execute(update(_meters).where(same).values(counted_until=metered.until)).rowcount:
        add(connection, metered.amounts)


def add_once(
    connection: Connection,
    counter: str,
    at: float,
    amounts: Mapping[UsageKey, float],
    sampled: Mapping[Tenanted, SampledSums],
) -> None:
    """Add the amounts and the runs' samples that `counter` has counted until `at`, unless they were added before: a
    counter repeats this call when it does not know whether its commit succeeded. Forgets counters that have added
    nothing for a day."""
    row = _meters.c.name == _COUNTER + counter
    counted_until = connection.execute(select(_meters.c.counted_until).where(row)).scalar()
    if counted_until == at:
        return
    if counted_until is None:
        unused = (_meters.c.name.startswith(_COUNTER), _meters.c.counted_until < at - 24 * HOUR_S)
        connection.execute(delete(_meters).where(*unused))
        connection.execute(insert(_meters), {"name": _COUNTER + counter, "counted_until": at})
    else:
        connection.execute(update(_meters).where(row).values(counted_until=at))
    add_sampled(connection, amounts, sampled)


class _Sampling:
    """The samples of one run's weights: how many are in flight, since when (monotonic seconds) some are that is not in
    the sums yet, and the sums since they were taken."""

    __slots__ = ("in_flight", "since", "sums")

    def __init__(self, now: float) -> None:
        self.in_flight = 0
        self.since = now
        self.sums = SampledSums()

    def note_time(self, now: float) -> None:
        if self.in_flight:
            self.sums.sampling_s += now - self.since
            self.since = now


class RunSamples:
    """Counts the samples of each run and tenant in memory. A sample costs two look-ups; a run is forgotten when its
    sums are taken and none of its samples is in flight."""

    def __init__(self) -> None:
        self._runs: dict[Tenanted, _Sampling] = {}

    def begin(self, run: Tenanted, now: float) -> None:
        found = self._runs.get(run)
        if found is None:
            found = self._runs[run] = _Sampling(now)
        if not found.in_flight:
            found.since = now
        found.in_flight += 1

    def end(self, run: Tenanted, now: float, samples: int, truncated: int, surprise: float, tokens: int) -> None:
        """A sample has ended, or failed without any sequences. `surprise` is the sum of -logprob of `tokens`."""
        found = self._runs[run]
        sums = found.sums
        sums.samples += samples
        sums.truncated += truncated
        sums.surprise_sum += surprise
        sums.surprise_tokens += tokens
        if found.in_flight == 1:  # its time is known now; that of other samples when the sums are taken
            found.note_time(now)
        found.in_flight -= 1

    def take(self) -> dict[Tenanted, SampledSums]:
        """The sums since the last call, of runs of which a sample has ended."""
        now, at = time.perf_counter(), time.time()
        taken: dict[Tenanted, SampledSums] = {}
        for run, found in [*self._runs.items()]:
            if found.sums.samples:
                found.note_time(now)
                found.sums.sampling_until = at
                taken[run], found.sums = found.sums, SampledSums()
            if not found.in_flight:
                del self._runs[run]
        return taken


class UsageCounter:
    """Counts samples in memory, so that a sample needs no second write: their usage, and `runs` by run. `flush` adds
    the counts to the tables.

    API processes flush every second and when they stop. A killed process loses the counts since its last flush.
    """

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer
        self._name = secrets.token_hex(8)
        self._amounts: dict[UsageKey, float] = {}
        self.runs = RunSamples()
        self._unsure: tuple[float, dict[UsageKey, float], dict[Tenanted, SampledSums]] | None = None
        """The counts of a failed flush, and the time until which they were counted. The flush may have been committed
        although it failed."""

    def count(self, amounts: Mapping[UsageKey, float]) -> None:
        for key, amount in amounts.items():
            self._amounts[key] = self._amounts.get(key, 0) + amount

    async def flush(self) -> None:
        while self._unsure is not None or self._amounts:
            if self._unsure is None:
                self._unsure, self._amounts = (time.time(), self._amounts, self.runs.take()), {}
            at, amounts, sampled = flushed = self._unsure
            await self._writer.transact(partial(add_once, counter=self._name, at=at, amounts=amounts, sampled=sampled))
            if self._unsure is flushed:  # another flush may have set it meanwhile
                self._unsure = None


@dataclass(frozen=True, slots=True)
class UsedAmount:
    """What one session of the tenant has used: see `UsageKey`."""

    bucket: int
    session_id: str
    base_model: str
    kind: str
    amount: float


@dataclass(frozen=True, slots=True)
class UsingSession:
    """A session that has usage."""

    project_id: str | None
    user_metadata: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class StoredCheckpoints:
    """Number and size of the live checkpoints of one project. `project_id` None stands for sessions without project."""

    project_id: str | None
    checkpoints: int
    size_bytes: int


class Usage:
    """Reads a tenant's usage."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def between(
        self, tenant: str, start: datetime, end: datetime
    ) -> tuple[list[UsedAmount], dict[str, UsingSession]]:
        """The sums of the hours in [start, end), and their sessions by id. The sums are in the order of the hours, and
        within an hour the largest first. Without PREFILL_AGAIN: Tinker counts no such thing."""
        wanted = (
            usage.c.tenant == tenant,
            usage.c.bucket >= int(start.astimezone(UTC).timestamp()),
            usage.c.bucket < int(end.astimezone(UTC).timestamp()),
            usage.c.kind != UsageKind.PREFILL_AGAIN,
        )
        amount = func.sum(usage.c.amount).label("amount")
        key = (usage.c.bucket, usage.c.session_id, usage.c.base_model, usage.c.kind)
        query = select(*key, amount).where(*wanted).group_by(*key).order_by(usage.c.bucket, amount.desc(), usage.c.kind)
        columns = sessions.c.id, sessions.c.project_id, sessions.c.user_metadata
        with_usage = select(*columns).where(sessions.c.id.in_(select(usage.c.session_id).where(*wanted)))

        def read(connection: Connection) -> tuple[list[UsedAmount], dict[str, UsingSession]]:
            amounts = [UsedAmount(*row) for row in connection.execute(query)]
            by_id = {row.id: UsingSession(row.project_id, row.user_metadata) for row in connection.execute(with_usage)}
            return amounts, by_id

        return await self._database.read_async(read)

    async def stored(self, tenant: str, project_id: str | None = None) -> list[StoredCheckpoints]:
        """A tenant's live checkpoints by project. With `project_id`, only of that project."""
        query = (
            select(sessions.c.project_id, func.count().label("n"), func.sum(_checkpoints.c.size_bytes).label("size"))
            .select_from(_checkpoints)
            .join(_models, _models.c.id == _checkpoints.c.model_id, isouter=True)
            .join(sessions, sessions.c.id == _models.c.session_id, isouter=True)
            .where(_checkpoints.c.tenant == tenant, live())
            .group_by(sessions.c.project_id)
            .order_by(sessions.c.project_id)
        )
        if project_id is not None:
            query = query.where(in_project(project_id))
        return await self._database.read_async(
            lambda c: [StoredCheckpoints(row.project_id, row.n, int(row.size)) for row in c.execute(query)]
        )
