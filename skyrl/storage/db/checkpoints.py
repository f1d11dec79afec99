"""Checkpoints: what was saved under a name, under which key its files are stored, and which tenants may see it.

A copy of a checkpoint belongs to a model that is not in training. Its session may be made for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Select,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    union_all,
    update,
)

from skyrl.base.types.weights import EVERYTHING, AdapterVersion, LoraSpec, Scope, WeightsRef
from skyrl.base.wire.paths import KINDS, CheckpointKind, TinkerPath
from skyrl.storage.db import audit, usage
from skyrl.storage.db.columns import lora_of, lora_values, record_of
from skyrl.storage.db.database import Database, in_groups
from skyrl.storage.db.models import Model, find_model, model_values, models
from skyrl.storage.db.scopes import in_scope, live
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.tables import CheckpointRow
from skyrl.storage.db.writer import GroupCommitWriter

checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]
NEWEST_FIRST = checkpoints.c.created_at.desc(), checkpoints.c.id.desc()

LOST = "lost/"
"""Begins the keys of checkpoints that version 0.2 could not put into the checkpoint store. Nothing is stored there."""


def _at(path: TinkerPath) -> ColumnElement[bool]:
    return and_(
        checkpoints.c.model_id == path.model_id,
        checkpoints.c.kind == path.kind,
        checkpoints.c.name == path.name,
    )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A named save of a model.

    Its files are in the checkpoint store under `store_key`. `weights` is what samplers of this checkpoint sample from;
    None where nobody can sample from it. Times are in seconds since the epoch.
    """

    path: TinkerPath
    tenant: str
    store_key: str
    weights: WeightsRef | None
    base_model: str
    lora: LoraSpec
    size_bytes: int
    public: bool
    user_metadata: dict[str, Any] | None
    created_at: float
    expires_at: float | None

    @property
    def is_trainable(self) -> bool:
        """Whether models can begin with it: a training state, or an upload, which has weights to sample from alone."""
        return self.path.kind == "weights" or (self.path.kind == "external_weights" and self.weights is not None)

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


def checkpoint_of(row: Any) -> Checkpoint:
    """From a row of the table."""
    return record_of(Checkpoint, row, path=TinkerPath(row.model_id, row.kind, row.name), lora=lora_of(row))


@dataclass(frozen=True)
class Seen:
    """Which live checkpoints a list shows: a tenant's own, or also those that other tenants have published; of which
    kinds."""

    published: bool = False
    kinds: tuple[CheckpointKind, ...] = KINDS

    def by(self, tenant: str) -> ColumnElement[bool]:
        """The condition for a query by models. No index of tenants serves it: a tenant has more checkpoints than these
        models have, and SQLite does not know that."""
        mine = func.coalesce(checkpoints.c.tenant, "") == tenant
        visible = or_(mine, checkpoints.c.public) if self.published else mine
        return and_(visible, checkpoints.c.kind.in_(self.kinds), live())

    def parts(self, tenant: str) -> list[ColumnElement[bool]]:
        """Conditions that exclude each other: own ones, and published ones of others. Each has an index in the order
        of creation; both together have none."""
        mine = checkpoints.c.tenant == tenant
        whose = [mine, checkpoints.c.public.is_(True) & (checkpoints.c.tenant != tenant)] if self.published else [mine]
        return [and_(part, checkpoints.c.kind.in_(self.kinds), live()) for part in whose]


def _first(connection: Connection, query: Select[Any]) -> Checkpoint | None:
    row = connection.execute(query).first()
    return None if row is None else checkpoint_of(row)


def _all(connection: Connection, query: Select[Any]) -> list[Checkpoint]:
    return [checkpoint_of(row) for row in connection.execute(query)]


def find_checkpoint(connection: Connection, path: TinkerPath, tenant: str) -> Checkpoint | None:
    """The checkpoint, if it is the tenant's own or public, and has not expired."""
    visible = or_(checkpoints.c.tenant == tenant, checkpoints.c.public)
    return _first(connection, select(checkpoints).where(_at(path), visible, live()))


def stored_at(connection: Connection, path: TinkerPath) -> Checkpoint | None:
    """The checkpoint of this name, whichever tenant's it is, expired or not."""
    return _first(connection, select(checkpoints).where(_at(path)))


def put(connection: Connection, checkpoint: Checkpoint, copy_key: str | None = None) -> None:
    """Insert a row, or replace the one of that name. The files of a replaced one are swept later. `copy_key`: see
    `skyrl.storage.db.tables`."""
    connection.execute(delete(checkpoints).where(_at(checkpoint.path)))
    values = {
        "tenant": checkpoint.tenant,
        "model_id": checkpoint.path.model_id,
        "kind": checkpoint.path.kind,
        "name": checkpoint.path.name,
        "store_key": checkpoint.store_key,
        "weights": checkpoint.weights,
        "copy_key": copy_key,
        "base_model": checkpoint.base_model,
        **lora_values(checkpoint.lora),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "created_at": checkpoint.created_at,
        "expires_at": checkpoint.expires_at,
    }
    connection.execute(insert(checkpoints), values)


def pop_expired(connection: Connection, now: float, limit: int, scope: Scope = EVERYTHING) -> list[str]:
    """Delete the rows of at most `limit` checkpoints that have expired. Returns the keys of their files, which are to
    be deleted too."""
    columns = [checkpoints.c[name] for name in ("id", "tenant", "model_id", "kind", "name", "store_key")]
    expired = select(*columns).where(checkpoints.c.expires_at <= now, in_scope(checkpoints.c.base_model, scope))
    rows = connection.execute(expired.limit(limit)).all()
    paths = [(row.tenant, TinkerPath(row.model_id, row.kind, row.name)) for row in rows]
    events = [(tenant, {"tinker_path": str(path), "model_id": path.model_id}) for tenant, path in paths]
    audit.record_all(connection, "checkpoint_expired", events)
    if rows:
        connection.execute(delete(checkpoints).where(checkpoints.c.id.in_([row.id for row in rows])))
    return [row.store_key for row in rows]


def stored_among(connection: Connection, keys: Iterable[str]) -> set[str]:
    """Those of these keys in the checkpoint store that are checkpoints'."""
    found: set[str] = set()
    for some in in_groups(keys):
        found.update(
            connection.execute(select(checkpoints.c.store_key).where(checkpoints.c.store_key.in_(some))).scalars()
        )
    return found


def count_stored(connection: Connection) -> int:
    """The number of checkpoints that were put into a checkpoint store."""
    stored = ~checkpoints.c.store_key.startswith(LOST, autoescape=True)
    return connection.execute(select(func.count()).select_from(checkpoints).where(stored)).scalar_one()


def store_key_of(connection: Connection, weights: WeightsRef) -> str | None:
    """The key of a stored checkpoint that holds these weights; None when no checkpoint does."""
    stored = ~checkpoints.c.store_key.startswith(LOST, autoescape=True)
    holding = select(checkpoints.c.store_key).where(checkpoints.c.weights == weights, stored)
    return connection.execute(holding.limit(1)).scalar()


class Checkpoints:
    """What the API does with saved checkpoints. Changes are recorded in the audit log of their owner."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def find(self, path: TinkerPath, tenant: str) -> Checkpoint | None:
        """As `find_checkpoint`."""
        return await self._database.read_async(lambda c: find_checkpoint(c, path, tenant))

    async def live(self, path: TinkerPath) -> Checkpoint | None:
        """The checkpoint if it has not expired, whichever tenant's it is. For callers who prove in another way that
        they may read it."""
        query = select(checkpoints).where(_at(path), live())
        return await self._database.read_async(lambda c: _first(c, query))

    async def store_key_of(self, weights: WeightsRef) -> str | None:
        """As the function `store_key_of`."""
        return await self._database.read_async(lambda c: store_key_of(c, weights))

    async def of_model(self, model_id: str, tenant: str, seen: Seen, newest: int | None = None) -> list[Checkpoint]:
        """A model's live checkpoints, oldest first; only so many of the newest if that is given."""
        query = select(checkpoints).where(checkpoints.c.model_id == model_id, seen.by(tenant))
        query = query.order_by(*NEWEST_FIRST).limit(newest)
        return await self._database.read_async(lambda c: _all(c, query)[::-1])

    async def latest(self, model_ids: list[str], tenant: str, seen: Seen) -> list[Checkpoint]:
        """The newest live checkpoint of each kind of these models."""
        ranked = (
            select(
                checkpoints,
                func.row_number()
                .over(
                    partition_by=(checkpoints.c.model_id, checkpoints.c.kind),
                    order_by=(checkpoints.c.created_at.desc(), checkpoints.c.id.desc()),
                )
                .label("rank"),
            )
            .where(checkpoints.c.model_id.in_(model_ids), seen.by(tenant))
            .subquery()
        )
        return await self._database.read_async(lambda c: _all(c, select(ranked).where(ranked.c.rank == 1)))

    async def page(self, tenant: str, limit: int, offset: int, seen: Seen) -> tuple[list[Checkpoint], int]:
        """Live checkpoints, newest first, and how many there are."""
        parts = seen.parts(tenant)
        ids = select(checkpoints.c.id).order_by(*NEWEST_FIRST).limit(offset + limit)
        newest = union_all(*(select(ids.where(part).subquery().c.id) for part in parts))
        query = select(checkpoints).where(checkpoints.c.id.in_(newest)).order_by(*NEWEST_FIRST)
        counts = [select(func.count()).select_from(checkpoints).where(part) for part in parts]

        def read(connection: Connection) -> tuple[list[Checkpoint], int]:
            found = _all(connection, query.limit(limit).offset(offset))
            return found, sum(connection.execute(count).scalar_one() for count in counts)

        return await self._database.read_async(read)

    async def change(self, path: TinkerPath, tenant: str, event: str, details: dict[str, Any], **values: Any) -> bool:
        """Update columns (public, expires_at); False if the tenant has no such checkpoint."""
        statement = update(checkpoints).where(_at(path), checkpoints.c.tenant == tenant, live()).values(**values)
        return await self._transact(statement, path, tenant, event, details)

    async def delete(self, path: TinkerPath, tenant: str) -> bool:
        """Clients no longer find it; the engine deletes the files later. False if the tenant has no such checkpoint."""
        statement = delete(checkpoints).where(_at(path), checkpoints.c.tenant == tenant, live())
        return await self._transact(statement, path, tenant, "checkpoint_deleted", {})

    async def _transact(
        self, statement: Executable, path: TinkerPath, tenant: str, event: str, details: dict[str, Any]
    ) -> bool:
        def change(connection: Connection) -> bool:
            if connection.execute(statement).rowcount == 0:
                return False
            audit.record(connection, tenant, event, tinker_path=str(path), model_id=path.model_id, **details)
            return True

        return await self._writer.transact(change)


@dataclass(frozen=True)
class Copy:
    """The copy to make. With `project_id`, an ended session is made for it, too. `copy_key` is derived from the
    request's idempotency key; None if the request has none."""

    path: TinkerPath
    tenant: str
    session_id: str
    model_seq_id: int
    store_key: str
    project_id: str | None = None
    expires_at: float | None = None
    copy_key: str | None = None


class Recorded(NamedTuple):
    """The result of `Copies.add`. `path` is the recorded copy: this one, or the copy that an earlier try has recorded.
    It is None when a model with the id exists already. If `new` is False, the files of this copy are not needed."""

    path: TinkerPath | None
    new: bool


class Copies:
    """Finds and records copies."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def made_by(self, copy_key: str, tenant: str | None = None) -> TinkerPath | None:
        """As the function `made_by`."""
        return await self._database.read_async(lambda connection: made_by(connection, copy_key, tenant))

    async def add(self, copy: Copy, source: Checkpoint, check: Callable[[Connection], None] | None = None) -> Recorded:
        """Record a copy of `source` whose files are stored, with all rows that it needs, in one transaction.

        Nothing is recorded if a request with the same key has made a copy already, in any API process, or if the model
        exists. Raises what `check` raises."""
        now = time.time()
        path = copy.path
        checkpoint = replace(
            source,
            path=path,
            tenant=copy.tenant,
            store_key=copy.store_key,
            weights=AdapterVersion.of(path.model_id, 1) if isinstance(source.weights, AdapterVersion) else None,
            public=False,
            created_at=now,
            expires_at=copy.expires_at,
        )

        def add(connection: Connection) -> Recorded:
            # Write transactions run one at a time: no other process can add a copy between this look-up and the insert.
            if copy.copy_key is not None and (made := made_by(connection, copy.copy_key)) is not None:
                return Recorded(made, new=False)
            if find_model(connection, path.model_id) is not None:
                return Recorded(None, new=False)
            if check is not None:
                check(connection)
            add_with_model(connection, copy, checkpoint, "copy_weights" if copy.project_id is not None else None)
            for tenant in sorted({copy.tenant, source.tenant}):
                audit.record(
                    connection,
                    tenant,
                    "checkpoint_copied",
                    tinker_path=str(path),
                    model_id=path.model_id,
                    source_path=str(source.path),
                )
            return Recorded(path, new=True)

        return await self._writer.transact(add)


def add_with_model(connection: Connection, copy: Copy, checkpoint: Checkpoint, new_session: str | None) -> None:
    """Add a checkpoint with the model that it belongs to, which is not in training. `new_session`: the tag of an ended
    session that is made for it; None if the session exists."""
    now, path = checkpoint.created_at, checkpoint.path
    if new_session is not None:
        session = {
            "id": copy.session_id,
            "tenant": copy.tenant,
            "status": "finished",
            "created_at": now,
            "heartbeat_at": now,
            "ended_at": now,
            "sdk_version": "",
            "tags": [new_session],
            "project_id": copy.project_id,
        }
        connection.execute(insert(sessions), session)
    base_model = checkpoint.base_model
    model = Model(path.model_id, copy.session_id, copy.tenant, base_model, checkpoint.lora, user_metadata=None)
    connection.execute(insert(models), model_values(model, copy.model_seq_id, "closed", sampler_version=1))
    put(connection, checkpoint, copy.copy_key)
    usage.count_checkpoint(connection, copy.tenant, copy.session_id, path.model_id, base_model)


def made_by(connection: Connection, copy_key: str, tenant: str | None = None) -> TinkerPath | None:
    """The checkpoint that was made under this key, if it still exists. `tenant`: and is this tenant's."""
    query = select(checkpoints).where(checkpoints.c.copy_key == copy_key)
    row = connection.execute(query if tenant is None else query.where(checkpoints.c.tenant == tenant)).first()
    return None if row is None else checkpoint_of(row).path
