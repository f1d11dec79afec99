"""Statements about adapter versions: which are needed, which are idle, and how many bytes they take.

A version is also needed by requests that have no row of their own, OpenAI requests: `AdapterUses` holds it for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, literal_column, select, text, union_all, update

from skyrl.base.types.weights import EVERYTHING, AdapterVersion, Scope, WeightsRef
from skyrl.base.wire.errors import NotFound
from skyrl.storage.db.agents import pinned
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import MAX_NAMED, in_groups
from skyrl.storage.db.futures import futures
from skyrl.storage.db.scopes import in_scope
from skyrl.storage.db.tables import AdapterUseRow, ModelRow, SamplingSessionRow, SessionRow
from skyrl.storage.db.writer import GroupCommitWriter

uses = AdapterUseRow.__table__  # type: ignore[attr-defined]

HOLD_S = 600.0
"""How long a row holds its version. The clocks of the processes may differ by minutes."""
RENEW_BEFORE_S = 300.0
"""A row that ends sooner is written again by the next request. `renew` does it for running requests."""

_HOLD = text(
    "INSERT INTO adapter_uses (weights, used_until) VALUES (:weights, :until) "
    "ON CONFLICT (weights) DO UPDATE SET used_until = excluded.used_until"
)


def _hold(connection: Connection, versions: Collection[AdapterVersion], until: float) -> None:
    """Rows in a fixed order, so that two processes cannot deadlock."""
    rows = [{"weights": name, "until": until} for name in sorted(map(str, versions))]
    if rows:
        connection.execute(_HOLD, rows)


class AdapterUses:
    """The uses of this process."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer
        self._running: Counter[AdapterVersion] = Counter()
        self._held_until: dict[AdapterVersion, float] = {}

    @asynccontextmanager
    async def using(self, weights: WeightsRef) -> AsyncIterator[None]:
        """Hold a version for as long as the block runs. Other weights need no hold.

        The caller has found the version's checkpoint just before. The engine waits `sweeping.GRACE_S` between unloading
        a version and deleting its files, and looks for uses again before it deletes them. So a checkpoint that is
        deleted between that look-up and this hold does no harm.
        """
        if not isinstance(weights, AdapterVersion):
            yield
            return
        self._running[weights] += 1
        try:
            if self._held_until.get(weights, 0.0) < time.time() + RENEW_BEFORE_S:
                await self._write([weights])
            yield
        finally:
            self._running[weights] -= 1
            if not self._running[weights]:
                del self._running[weights]

    async def renew(self) -> None:
        """Hold the versions of running requests for longer, and forget ended uses. Call it about once a minute."""
        now = time.time()
        self._held_until = {weights: until for weights, until in self._held_until.items() if until > now}
        ending = [w for w in self._running if self._held_until.get(w, 0.0) < now + RENEW_BEFORE_S]
        if ending:
            await self._write(ending)

    async def _write(self, versions: Collection[AdapterVersion]) -> None:
        now = time.time()

        def write(connection: Connection) -> None:
            connection.execute(delete(uses).where(uses.c.used_until < now - HOLD_S))
            _hold(connection, versions, now + HOLD_S)

        await self._writer.transact(write)
        self._held_until |= dict.fromkeys(versions, now + HOLD_S)


samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]
_models: Any = ModelRow.__table__  # type: ignore[attr-defined]
_sessions: Any = SessionRow.__table__  # type: ignore[attr-defined]

NEWEST = 4
"""How many of the newest versions of each model are never dropped."""
NOTICE_S = 30.0
"""How long after a version is dropped it may be unloaded. Until then API processes learn of the drop, and samples that
they have accepted before end."""

# The values are literals and no parameters, because SQLite uses a partial index only if the query's text implies the
# condition of the index.
OPEN = samplers.c.status == literal_column("'active'")
OPEN_ADAPTER = OPEN & (samplers.c.weights != literal_column("'base'"))
_DROPPED = samplers.c.status == literal_column("'dropped'")
_PENDING = futures.c.status == literal_column("'pending'")
_ACTIVE_SESSION = _sessions.c.status == literal_column("'active'")


class SamplerDropped(NotFound):
    """The adapter of a sampling session has been dropped."""

    def __init__(self, sampling_session_id: str) -> None:
        super().__init__(dropped_sentence(sampling_session_id), field="sampling_session_id")


def dropped_sentence(sampling_session_id: str) -> str:
    return (
        f"the weights of sampling session {sampling_session_id!r} have been deleted: no checkpoint holds them, nobody "
        "had sampled from them for long, and their model has newer ones. Save the weights again, or save them with a "
        "name, which keeps them"
    )


def held(connection: Connection, now: float, versions: Collection[AdapterVersion]) -> set[WeightsRef]:
    """The versions among `versions` (at most MAX_NAMED) that a checkpoint, an open sampling session, an agent session
    or an OpenAI request needs, or that were dropped less than NOTICE_S ago."""
    queries = (
        select(samplers.c.weights).where(samplers.c.weights.in_(versions), OPEN),
        select(samplers.c.weights).where(_DROPPED, samplers.c.closed_at > now - NOTICE_S),
        select(checkpoints.c.weights).where(checkpoints.c.weights.in_(versions)),
        select(uses.c.weights).where(uses.c.weights.in_(versions), uses.c.used_until > now),
        pinned(),
    )
    return set(connection.execute(union_all(*queries)).scalars())


def in_use(connection: Connection, used_since: float, limit: int, scope: Scope = EVERYTHING) -> list[AdapterVersion]:
    """At most `limit` versions of open sampling sessions with samples since `used_since`, the last used first. `scope`:
    the names of the base model that the sessions sample from."""
    query = (
        select(samplers.c.weights)
        .where(OPEN_ADAPTER, samplers.c.last_used_at >= used_since, in_scope(samplers.c.base_model, scope))
        .order_by(samplers.c.last_used_at.desc(), samplers.c.weights)
    )
    found: dict[AdapterVersion, None] = {}
    with connection.execute(query, execution_options={"yield_per": MAX_NAMED}) as rows:
        for weights in rows.scalars():
            if len(found) == limit:
                break
            if isinstance(weights, AdapterVersion):
                found[weights] = None
    return list(found)


def sampled_now(connection: Connection, versions: Collection[AdapterVersion]) -> set[WeightsRef]:
    """The versions among `versions` (at most MAX_NAMED) that have pending samples."""
    query = (
        select(samplers.c.weights)
        .join(futures, futures.c.sampling_session_id == samplers.c.id)
        .where(samplers.c.weights.in_(versions), _PENDING)
    )
    return set(connection.execute(query).scalars()) if versions else set()


def _unsaved() -> ColumnElement[bool]:
    """The condition that no checkpoint has the weights of a sampling session: they were saved without a name, or the
    checkpoint was deleted."""
    return ~select(checkpoints.c.id).where(checkpoints.c.weights == samplers.c.weights).exists()


def not_saved(connection: Connection, scope: Scope = EVERYTHING) -> list[AdapterVersion]:
    """The versions of open sampling sessions that no checkpoint has."""
    wanted = in_scope(samplers.c.base_model, scope)
    query = select(samplers.c.weights).where(OPEN_ADAPTER, _unsaved(), wanted).distinct()
    return [weights for weights in connection.execute(query).scalars() if isinstance(weights, AdapterVersion)]


def idle(connection: Connection, used_before: float, scope: Scope = EVERYTHING) -> list[str]:
    """Ids of open sampling sessions, at most MAX_NAMED, whose version is to be dropped: no checkpoint has it, nobody
    has sampled from it since `used_before`, it is not among its model's newest, and its model is in the scope."""
    query = select(samplers.c.id, samplers.c.weights).where(
        OPEN_ADAPTER, samplers.c.last_used_at < used_before, _unsaved()
    )
    found = [(row.id, row.weights) for row in connection.execute(query) if isinstance(row.weights, AdapterVersion)]
    newest = _newest_versions(connection, {version.model_id for _, version in found}, scope)
    old = [
        sampler_id
        for sampler_id, version in found
        if version.number <= newest.get(version.model_id, version.number) - NEWEST
    ]
    return old[:MAX_NAMED]


def _newest_versions(connection: Connection, model_ids: Iterable[str], scope: Scope) -> dict[str, int]:
    newest: dict[str, int] = {}
    for ids in in_groups(sorted(model_ids)):
        named = _models.c.id.in_(ids)
        query = select(_models.c.id, _models.c.sampler_version).where(named, in_scope(_models.c.base_model, scope))
        newest |= {row.id: row.sampler_version for row in connection.execute(query)}
    return newest


def drop(connection: Connection, sampler_ids: Sequence[str], used_before: float) -> list[WeightsRef]:
    """Mark sampling sessions as dropped, and return their weights.

    A sampling session stays open if it was used meanwhile or has a pending sample. No sample can be recorded during
    this, because write transactions run one at a time."""
    running = select(futures.c.n).where(futures.c.sampling_session_id == samplers.c.id, _PENDING)
    dropped = (
        update(samplers)
        .where(samplers.c.id.in_(sampler_ids), OPEN, samplers.c.last_used_at < used_before, ~running.exists())
        .values(status="dropped", closed_at=time.time())
        .returning(samplers.c.weights)
    )
    return list(connection.execute(dropped).scalars()) if sampler_ids else []


def dropped_since(connection: Connection, since: float) -> list[str]:
    """Ids of sampling sessions that were dropped after `since`."""
    return list(connection.execute(select(samplers.c.id).where(_DROPPED, samplers.c.closed_at > since)).scalars())


def note_uses(connection: Connection, sampler_ids: Collection[str], at: float) -> None:
    """Store when these sampling sessions were last used."""
    for ids in in_groups(sorted(sampler_ids)):
        connection.execute(update(samplers).where(samplers.c.id.in_(ids), OPEN).values(last_used_at=at))


def unsaved_bytes(connection: Connection, tenant: str | None = None) -> dict[str, int]:
    """By tenant: the bytes of versions that open sampling sessions need and no checkpoint has. With `tenant`, only of
    that tenant's active sessions, from which the query starts."""
    wanted = OPEN_ADAPTER
    if tenant is not None:
        active = select(_sessions.c.id).where(_sessions.c.tenant == tenant, _ACTIVE_SESSION)
        wanted &= samplers.c.session_id.in_(active) & (samplers.c.tenant == tenant)
    versions = (
        select(samplers.c.tenant, func.max(samplers.c.size_bytes).label("size"))
        .where(wanted, _unsaved())
        .group_by(samplers.c.tenant, samplers.c.weights)
        .subquery()
    )
    query = select(versions.c.tenant, func.sum(versions.c.size).label("total")).group_by(versions.c.tenant)
    return {row.tenant: int(row.total or 0) for row in connection.execute(query)}


def closed(connection: Connection, closed_before: float, limit: int) -> list[str]:
    """Ids of at most `limit` sampling sessions that closed before `closed_before`, the first first, whose session has
    ended. Call it in a read transaction: it also reads the dropped ones of living sessions, which may be many."""
    living = select(_sessions.c.id).where(_sessions.c.id == samplers.c.session_id, _ACTIVE_SESSION)
    old = select(samplers.c.id).where(samplers.c.closed_at < closed_before, ~living.exists())
    return list(connection.execute(old.order_by(samplers.c.closed_at).limit(limit)).scalars())


def forget(connection: Connection, sampler_ids: Collection[str]) -> None:
    """Delete the rows of these sampling sessions, at most MAX_NAMED."""
    connection.execute(delete(samplers).where(samplers.c.id.in_(sampler_ids)))
