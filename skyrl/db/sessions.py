"""Sessions: who is there, who has gone. Cached in memory; another tenant's looks as if it did not exist."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, insert, select, update

from skyrl.db import audit
from skyrl.db.database import Database
from skyrl.db.tables import ModelRow, SamplingSessionRow, SessionRow
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.ids import new_session_id

sessions = SessionRow.__table__  # type: ignore[attr-defined]
models = ModelRow.__table__  # type: ignore[attr-defined]
samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]

DEFAULT_PROJECT = "default"
"""Where sessions are that were put into no project."""

_INSERT = insert(sessions)
_BEAT = (
    update(sessions)
    .where(sessions.c.id == bindparam("session"), sessions.c.status == "active")
    .values(heartbeat_at=bindparam("now"))
)
_END = (
    update(sessions)
    .where(sessions.c.id == bindparam("session"), sessions.c.status == "active")
    .values(
        status=bindparam("to"),
        finish_reason=bindparam("reason"),
        finish_detail=bindparam("detail"),
        ended_at=bindparam("at"),
    )
)


@dataclass(slots=True)
class Session:
    """A session as the API process keeps it. Times: seconds since the epoch."""

    id: str
    tenant: str
    status: str
    heartbeat_at: float
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    display_name: str | None = None


def _session(row: Any, heartbeat_at: float) -> Session:
    return Session(row.id, row.tenant, row.status, heartbeat_at, row.user_metadata, row.project_id, row.display_name)


def in_project(project_id: str) -> ColumnElement[bool]:
    """Whether a sessions row belongs to a project."""
    here = sessions.c.project_id == project_id
    return here | sessions.c.project_id.is_(None) if project_id == DEFAULT_PROJECT else here


class Sessions:
    """Create, find, keep alive, end."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._known: dict[str, Session] = {}
        self._started_at = time.time()

    async def load(self) -> None:
        """Read active sessions at start; the time the server was away does not count as their silence."""
        rows = await self._database.read_async(
            lambda c: list(c.execute(select(sessions).where(sessions.c.status == "active")))
        )
        for row in rows:
            self._known[row.id] = _session(row, self._started_at)

    async def create(
        self,
        tenant: str,
        tags: list[str],
        user_metadata: dict[str, Any] | None,
        sdk_version: str,
        *,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> Session:
        now = time.time()
        session = Session(new_session_id(), tenant, "active", now, user_metadata, project_id, display_name)
        await self._writer.execute(
            _INSERT,
            {
                "id": session.id,
                "tenant": tenant,
                "status": "active",
                "created_at": now,
                "heartbeat_at": now,
                "sdk_version": sdk_version,
                "tags": tags,
                "user_metadata": user_metadata,
                "project_id": project_id,
                "display_name": display_name,
            },
        )
        self._known[session.id] = session
        return session

    async def find(self, session_id: str, tenant: str) -> Session | None:
        """The tenant's session, active or not."""
        session = self._known.get(session_id)
        if session is None:
            row = await self._database.read_async(
                lambda c: c.execute(select(sessions).where(sessions.c.id == session_id)).first()
            )
            if row is None:
                return None
            session = _session(row, row.heartbeat_at)
            if session.status == "active":
                self._known[session_id] = session
        return session if session.tenant == tenant else None

    async def beat(self, session: Session) -> None:
        session.heartbeat_at = time.time()
        await self._writer.execute(_BEAT, {"session": session.id, "now": session.heartbeat_at})

    async def end(self, session: Session, to: str, reason: str | None, detail: str | None) -> bool:
        """Mark finished or expired; the first reason wins. False if it had ended before."""
        if session.status != "active":
            return False
        session.status = to
        ending = {"session": session.id, "to": to, "reason": reason, "detail": detail, "at": time.time()}
        await self._writer.execute(_END, ending)
        self._known.pop(session.id, None)  # not before: a look-up in between would find it active
        return True

    async def assign_project(self, session: Session, project_id: str) -> None:
        """Move a session, running or not, with all that belongs to it, into a project; the audit log says so."""

        def assign(connection: Connection) -> None:
            before = connection.execute(select(sessions.c.project_id).where(sessions.c.id == session.id)).scalar_one()
            connection.execute(update(sessions).where(sessions.c.id == session.id).values(project_id=project_id))
            if before != project_id:
                audit.record(
                    connection,
                    session.tenant,
                    "project_session_assigned",
                    session_id=session.id,
                    project_id=project_id,
                    previous_project_id=before,
                )

        await self._writer.transact(assign)
        session.project_id = project_id

    def silent(self, timeout_s: float) -> list[Session]:
        """Active sessions without a heartbeat for `timeout_s`."""
        deadline = time.time() - timeout_s
        return [s for s in self._known.values() if s.status == "active" and s.heartbeat_at < deadline]

    async def list_ids(self, tenant: str, limit: int, offset: int) -> list[str]:
        query = select(sessions.c.id).where(sessions.c.tenant == tenant).order_by(sessions.c.created_at.desc())
        return await self._database.read_async(
            lambda c: [row.id for row in c.execute(query.limit(limit).offset(offset))]
        )

    async def contents(self, session_id: str) -> tuple[list[str], list[str]]:
        """Ids of a session's models and sampling sessions, in order of creation."""
        queries = [
            select(table.c.id).where(table.c.session_id == session_id).order_by(table.c.created_at)
            for table in (models, samplers)
        ]
        model_ids, sampler_ids = await self._database.read_async(
            lambda c: [[row.id for row in c.execute(query)] for query in queries]
        )
        return model_ids, sampler_ids
