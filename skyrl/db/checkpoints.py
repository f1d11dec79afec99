"""Checkpoints: what was saved under a name, where it lies, whose it is, who may see it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, and_, delete, func, insert, or_, select, update

from skyrl.db import audit
from skyrl.db.database import Database
from skyrl.db.tables import CheckpointRow
from skyrl.db.writer import GroupCommitWriter
from skyrl.wire.paths import KINDS, CheckpointKind, TinkerPath

checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]


def _at(path: TinkerPath) -> Any:
    return (
        (checkpoints.c.model_id == path.model_id)
        & (checkpoints.c.kind == path.kind)
        & (checkpoints.c.name == path.name)
    )


def _live() -> Any:
    return or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > time.time())


@dataclass(frozen=True)
class Seen:
    """Which live checkpoints a list shows: a tenant's own, or also what others have published; of which kinds."""

    published: bool = False
    kinds: tuple[CheckpointKind, ...] = KINDS

    def by(self, tenant: str) -> ColumnElement[bool]:
        mine = checkpoints.c.tenant == tenant
        whose = mine | checkpoints.c.public.is_(True) if self.published else mine
        return and_(whose, checkpoints.c.kind.in_(self.kinds), _live())


def find_checkpoint(connection: Connection, path: TinkerPath, tenant: str) -> Any | None:
    """The row, if it is the tenant's own or public, and has not expired."""
    visible = or_(checkpoints.c.tenant == tenant, checkpoints.c.public)
    return connection.execute(select(checkpoints).where(_at(path), visible, _live())).first()


def exists(connection: Connection, path: TinkerPath) -> Any | None:
    return connection.execute(select(checkpoints).where(_at(path))).first()


def put(connection: Connection, values: dict[str, Any]) -> None:
    """Insert a row, or replace the one of that name; the files of a replaced one are swept later."""
    path = TinkerPath(values["model_id"], values["kind"], values["name"])
    old = exists(connection, path)
    if old is not None:
        connection.execute(delete(checkpoints).where(checkpoints.c.id == old.id))
    connection.execute(insert(checkpoints), values)


def pop_expired(connection: Connection, now: float) -> list[Any]:
    """Delete rows whose time is over; returns them, so that their files can follow."""
    expired = list(connection.execute(select(checkpoints).where(checkpoints.c.expires_at <= now)))
    for row in expired:
        path = TinkerPath(row.model_id, row.kind, row.name)
        audit.record(connection, row.tenant, "checkpoint_expired", tinker_path=str(path), model_id=row.model_id)
    if expired:
        connection.execute(delete(checkpoints).where(checkpoints.c.id.in_([row.id for row in expired])))
    return expired


class Checkpoints:
    """What the API does with saved checkpoints. Changes are recorded in the audit log of their owner."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def find(self, path: TinkerPath, tenant: str) -> Any | None:
        """As `find_checkpoint`."""
        return await self._database.read_async(lambda c: find_checkpoint(c, path, tenant))

    async def live(self, path: TinkerPath) -> Any | None:
        """The row, whoever's it is: for who proves otherwise that they may read it."""
        query = select(checkpoints).where(_at(path), _live())
        return await self._database.read_async(lambda c: c.execute(query).first())

    async def of_model(self, model_id: str, tenant: str, seen: Seen) -> list[Any]:
        """A model's live checkpoints, oldest first."""
        query = select(checkpoints).where(checkpoints.c.model_id == model_id, seen.by(tenant))
        return await self._database.read_async(lambda c: list(c.execute(query.order_by(checkpoints.c.created_at))))

    async def latest(self, model_ids: list[str], tenant: str, seen: Seen) -> list[Any]:
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
        return await self._database.read_async(lambda c: list(c.execute(select(ranked).where(ranked.c.rank == 1))))

    async def page(self, tenant: str, limit: int, offset: int, seen: Seen) -> tuple[list[Any], int]:
        """Live checkpoints, newest first, and how many there are."""
        order = (checkpoints.c.created_at.desc(), checkpoints.c.id.desc())
        query = select(checkpoints).where(seen.by(tenant)).order_by(*order).limit(limit).offset(offset)
        count = select(func.count()).select_from(checkpoints).where(seen.by(tenant))
        return await self._database.read_async(lambda c: (list(c.execute(query)), c.execute(count).scalar_one()))

    async def change(self, path: TinkerPath, tenant: str, event: str, details: dict[str, Any], **values: Any) -> bool:
        """Update columns (public, expires_at); False if the tenant has no such checkpoint."""
        statement = update(checkpoints).where(_at(path), checkpoints.c.tenant == tenant, _live()).values(**values)
        return await self._transact(statement, path, tenant, event, details)

    async def delete(self, path: TinkerPath, tenant: str) -> bool:
        """Gone at once for clients; the engine sweeps the files. False if the tenant has no such checkpoint."""
        statement = delete(checkpoints).where(_at(path), checkpoints.c.tenant == tenant, _live())
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
