"""Statements about adapter versions: who needs one, which ones nobody has sampled from for long, what they take.

A version is needed by a checkpoint, by an open sampling session, and by a sample that still runs. One that no
checkpoint holds is dropped after a time without samples: its sampling session gets the status `dropped`, and later its
files are deleted. Knows rows; what lies on disk, and what vLLM has loaded, is the sweeper's business.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, literal_column, select, union_all, update

from skyrl.db.checkpoints import checkpoints
from skyrl.db.futures import MAX_NAMED, futures
from skyrl.db.tables import ModelRow, SamplingSessionRow, SessionRow
from skyrl.wire.errors import NotFound
from skyrl.wire.paths import adapter_version_of

samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]
_models: Any = ModelRow.__table__  # type: ignore[attr-defined]
_sessions: Any = SessionRow.__table__  # type: ignore[attr-defined]

NEWEST = 4
"""So many newest versions of a model are never dropped."""
NOTICE_S = 30.0
"""Between dropping a version and unloading it: API processes look for dropped versions every few seconds, and what they
have taken before runs to its end."""

# Spelled out, not bound: SQLite takes a partial index only where the query's text implies its condition.
OPEN = samplers.c.status == literal_column("'active'")
_OPEN_ADAPTER = OPEN & samplers.c.adapter_name.is_not(None)
_DROPPED = samplers.c.status == literal_column("'dropped'")
_PENDING = futures.c.status == literal_column("'pending'")


class SamplerDropped(NotFound):
    """The adapter of a sampling session has been dropped."""

    def __init__(self, sampling_session_id: str, *, field: str = "sampling_session_id") -> None:
        super().__init__(dropped_sentence(sampling_session_id), field=field)


def dropped_sentence(sampling_session_id: str) -> str:
    return (
        f"the weights of sampling session {sampling_session_id!r} have been deleted: no checkpoint holds them, nobody "
        "had sampled from them for long, and their model has newer ones. Save the weights again, or save them with a "
        "name, which keeps them"
    )


def held(connection: Connection, now: float) -> set[str]:
    """Names of versions that a checkpoint or an open sampling session holds, or that were dropped just now."""
    queries = (
        select(samplers.c.adapter_name).where(_OPEN_ADAPTER),
        select(samplers.c.adapter_name).where(_DROPPED, samplers.c.closed_at > now - NOTICE_S),
        select(checkpoints.c.adapter_name).where(checkpoints.c.adapter_name.is_not(None)),
    )
    return set(connection.execute(union_all(*queries)).scalars())


def in_use(connection: Connection, used_since: float, limit: int) -> list[str]:
    """Names of at most `limit` versions that open sampling sessions have sampled from since then, the latest first."""
    query = (
        select(samplers.c.adapter_name)
        .where(_OPEN_ADAPTER, samplers.c.last_used_at >= used_since)
        .group_by(samplers.c.adapter_name)
        .order_by(func.max(samplers.c.last_used_at).desc(), samplers.c.adapter_name)
        .limit(limit)
    )
    return list(connection.execute(query).scalars())


def sampled_now(connection: Connection, names: Collection[str]) -> set[str]:
    """Those of `names` (at most MAX_NAMED) that a pending sample is on."""
    query = (
        select(samplers.c.adapter_name)
        .join(futures, futures.c.sampling_session_id == samplers.c.id)
        .where(samplers.c.adapter_name.in_(names), _PENDING)
    )
    return set(connection.execute(query).scalars()) if names else set()


def _unsaved() -> ColumnElement[bool]:
    """Whether no checkpoint has the adapter of a sampling session: it was saved without a name, or its checkpoint has
    been deleted since."""
    return ~select(checkpoints.c.id).where(checkpoints.c.adapter_name == samplers.c.adapter_name).exists()


def idle(connection: Connection, used_before: float) -> list[str]:
    """Ids of open sampling sessions, at most MAX_NAMED, whose version is to be dropped: no checkpoint has it, nobody
    has sampled from it since `used_before`, and it is not among its model's newest."""
    query = select(samplers.c.id, samplers.c.adapter_name).where(
        _OPEN_ADAPTER, samplers.c.last_used_at < used_before, _unsaved()
    )
    found = [(row.id, *adapter_version_of(row.adapter_name)) for row in connection.execute(query)]
    newest = _newest_versions(connection, {model_id for _, model_id, _ in found})
    old = [sampler_id for sampler_id, model_id, version in found if version <= newest.get(model_id, version) - NEWEST]
    return old[:MAX_NAMED]


def _newest_versions(connection: Connection, model_ids: Iterable[str]) -> dict[str, int]:
    ids, newest = sorted(model_ids), {}
    for start in range(0, len(ids), MAX_NAMED):
        named = select(_models.c.id, _models.c.sampler_version).where(_models.c.id.in_(ids[start : start + MAX_NAMED]))
        newest |= {row.id: row.sampler_version for row in connection.execute(named)}
    return newest


def drop(connection: Connection, sampler_ids: Sequence[str], used_before: float) -> list[str]:
    """Mark these sampling sessions as dropped, and return the names of their versions. One that has been sampled from
    meanwhile, or that a pending sample is on, stays open: samples are recorded one transaction after the other with
    this one."""
    running = select(futures.c.n).where(futures.c.sampling_session_id == samplers.c.id, _PENDING)
    dropped = (
        update(samplers)
        .where(samplers.c.id.in_(sampler_ids), OPEN, samplers.c.last_used_at < used_before, ~running.exists())
        .values(status="dropped", closed_at=time.time())
        .returning(samplers.c.adapter_name)
    )
    return list(connection.execute(dropped).scalars()) if sampler_ids else []


def dropped_since(connection: Connection, since: float) -> list[str]:
    """Ids of sampling sessions that were dropped after `since`."""
    return list(connection.execute(select(samplers.c.id).where(_DROPPED, samplers.c.closed_at > since)).scalars())


def note_uses(connection: Connection, sampler_ids: Collection[str], at: float) -> None:
    """These sampling sessions were sampled from a moment ago."""
    ids = sorted(sampler_ids)
    for start in range(0, len(ids), MAX_NAMED):
        named = samplers.c.id.in_(ids[start : start + MAX_NAMED])
        connection.execute(update(samplers).where(named, OPEN).values(last_used_at=at))


def unsaved_bytes(connection: Connection, tenant: str | None = None) -> dict[str, int]:
    """By tenant, of all or of one: bytes of versions that its sampling sessions hold and no checkpoint does."""
    mine = _OPEN_ADAPTER if tenant is None else _OPEN_ADAPTER & (samplers.c.tenant == tenant)
    versions = (
        select(samplers.c.tenant, func.max(samplers.c.size_bytes).label("size"))
        .where(mine, _unsaved())
        .group_by(samplers.c.tenant, samplers.c.adapter_name)
        .subquery()
    )
    query = select(versions.c.tenant, func.sum(versions.c.size).label("total")).group_by(versions.c.tenant)
    return {row.tenant: int(row.total or 0) for row in connection.execute(query)}


def forget_closed(connection: Connection, closed_before: float, limit: int) -> int:
    """Delete rows of sampling sessions that closed before then and whose session is over; returns how many."""
    living = select(_sessions.c.id).where(_sessions.c.id == samplers.c.session_id, _sessions.c.status == "active")
    old = select(samplers.c.id).where(samplers.c.closed_at < closed_before, ~living.exists())
    old = old.order_by(samplers.c.closed_at).limit(limit)
    return connection.execute(delete(samplers).where(samplers.c.id.in_(old))).rowcount
