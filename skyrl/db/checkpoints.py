"""Checkpoints: what was saved under a name, where it lies, whose it is."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from skyrl.db.database import Database
from skyrl.db.tables import CheckpointRow
from skyrl.db.writer import GroupCommitWriter
from skyrl.wire.paths import TinkerPath

checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]


def _at(path: TinkerPath) -> Any:
    return (
        (checkpoints.c.model_id == path.model_id)
        & (checkpoints.c.kind == path.kind)
        & (checkpoints.c.name == path.name)
    )


def _live() -> Any:
    return or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > time.time())


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
    if expired:
        connection.execute(delete(checkpoints).where(checkpoints.c.id.in_([row.id for row in expired])))
    return expired


class Checkpoints:
    """What the API does with saved checkpoints."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def find(self, path: TinkerPath, tenant: str) -> Any | None:
        return await self._database.read_async(lambda c: find_checkpoint(c, path, tenant))

    async def of_model(self, model_id: str, tenant: str) -> list[Any]:
        query = select(checkpoints).where(checkpoints.c.model_id == model_id, checkpoints.c.tenant == tenant, _live())
        return await self._database.read_async(lambda c: list(c.execute(query.order_by(checkpoints.c.created_at))))

    async def latest(self, model_ids: list[str]) -> list[Any]:
        """All live checkpoints of these models, oldest first."""
        query = select(checkpoints).where(checkpoints.c.model_id.in_(model_ids), _live())
        return await self._database.read_async(lambda c: list(c.execute(query.order_by(checkpoints.c.created_at))))

    async def page(self, tenant: str, limit: int, offset: int) -> tuple[list[Any], int]:
        """A tenant's live checkpoints, newest first, and how many there are."""
        mine = (checkpoints.c.tenant == tenant, _live())
        query = select(checkpoints).where(*mine).order_by(checkpoints.c.created_at.desc()).limit(limit).offset(offset)
        count = select(func.count()).select_from(checkpoints).where(*mine)
        return await self._database.read_async(lambda c: (list(c.execute(query)), c.execute(count).scalar_one()))

    async def change(self, path: TinkerPath, tenant: str, **values: Any) -> bool:
        """Update columns (public, expires_at); False if the tenant has no such checkpoint."""
        statement = update(checkpoints).where(_at(path), checkpoints.c.tenant == tenant, _live()).values(**values)
        return await self._writer.transact(lambda c: c.execute(statement).rowcount > 0)
