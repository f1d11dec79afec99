"""The audit log: what happened to a tenant's checkpoints and projects, when. Rows are only ever added."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, insert, select

from skyrl.db.database import Database
from skyrl.db.tables import AuditEventRow
from skyrl.db.writer import GroupCommitWriter

audit_events = AuditEventRow.__table__  # type: ignore[attr-defined]


def record(connection: Connection, tenant: str, event: str, **details: Any) -> None:
    """Add an event in the transaction of what it tells of.

    `event` is `<resource>_<action>` (`checkpoint_created`); `details` are JSON values that say who and what. For an
    event on a checkpoint they hold `tinker_path` and `model_id`.
    """
    values = {"at": time.time(), "tenant": tenant, "event": event, "details": details}
    connection.execute(insert(audit_events), values)


class Audit:
    """The log as the API writes and reads it."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def record(self, tenant: str, event: str, **details: Any) -> None:
        """`record` in a transaction of its own, for what changes no row."""
        await self._writer.transact(lambda connection: record(connection, tenant, event, **details))

    async def between(self, tenant: str, start: float, end: float, resource: str | None = None) -> list[Any]:
        """Rows (at, event, details) of a tenant in [start, end), oldest first; those on one kind of thing only, if
        `resource` (`checkpoint`, `project`) is given."""
        query = select(audit_events).where(
            audit_events.c.tenant == tenant, audit_events.c.at >= start, audit_events.c.at < end
        )
        if resource is not None:
            query = query.where(audit_events.c.event.startswith(f"{resource}_", autoescape=True))
        query = query.order_by(audit_events.c.at, audit_events.c.id)
        return await self._database.read_async(lambda connection: list(connection.execute(query)))
