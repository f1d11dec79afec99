"""The audit log: events on a tenant's checkpoints, projects and keys. Events are added and never changed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache
from sqlalchemy import Connection, insert, select

from skyrl.storage.db.database import Database
from skyrl.storage.db.tables import AuditEventRow
from skyrl.storage.db.writer import GroupCommitWriter

audit_events = AuditEventRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One event. `at` is in seconds since the epoch. `event` and `details` are as in `record`."""

    at: float
    event: str
    details: dict[str, Any]


STRANGERS_S, MAX_TOLD = 3600.0, 10_000
"""A tenant who uses another one's published checkpoint, as often as it likes, adds one event of a kind in so many
seconds to the owner's log, from each process that has not forgotten it among so many."""
_OFTEN = ("checkpoint_sampled", "checkpoint_downloaded")
"""What costs a stranger nothing."""
_told: LRUCache[tuple[Any, ...], float] = LRUCache(MAX_TOLD)
"""When this process has last recorded a stranger's event."""
_telling = threading.Lock()


def record(connection: Connection, tenant: str, event: str, **details: Any) -> None:
    """Add an event in the transaction that makes the change.

    `event` is `<resource>_<action>` (`checkpoint_created`). `details` are JSON values. An event on a checkpoint has
    `tinker_path` and `model_id` among them, and that of a stranger `reader`: of _OFTEN one in STRANGERS_S is enough.
    """
    now = time.time()
    if "reader" in details and event in _OFTEN:
        key = tenant, event, details["reader"], details["tinker_path"]
        with _telling:
            told = _told.get(key, -math.inf)
        if told > now - STRANGERS_S and _is_there(connection, tenant, told):
            return
        with _telling:
            _told[key] = now
    connection.execute(insert(audit_events), {"at": now, "tenant": tenant, "event": event, "details": details})


def _is_there(connection: Connection, tenant: str, at: float) -> bool:
    """Whether the transaction of an event was committed."""
    found = select(audit_events.c.id).where(audit_events.c.tenant == tenant, audit_events.c.at == at)
    return connection.execute(found.limit(1)).first() is not None


def record_all(connection: Connection, event: str, each: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """As `record`, for many things at once: the tenant and the details of each. Sent to the database together."""
    now = time.time()
    rows = [{"at": now, "tenant": tenant, "event": event, "details": details} for tenant, details in each]
    if rows:
        connection.execute(insert(audit_events), rows)


class Audit:
    """The audit log in an API process."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def record(self, tenant: str, event: str, **details: Any) -> None:
        """`record` in a transaction of its own, for an action that changes no row."""
        await self._writer.transact(lambda connection: record(connection, tenant, event, **details))

    async def between(self, tenant: str, start: float, end: float, resource: str | None = None) -> list[AuditEvent]:
        """A tenant's events in [start, end), oldest first. With `resource` (`checkpoint`, `project`), only the events
        on that resource."""
        columns = audit_events.c.at, audit_events.c.event, audit_events.c.details
        query = select(*columns).where(
            audit_events.c.tenant == tenant, audit_events.c.at >= start, audit_events.c.at < end
        )
        if resource is not None:
            query = query.where(audit_events.c.event.startswith(f"{resource}_", autoescape=True))
        query = query.order_by(audit_events.c.at, audit_events.c.id)
        return await self._database.read_async(lambda c: [AuditEvent(*row) for row in c.execute(query)])
