"""Sessions: who is there, who has gone. Cached in memory; another tenant's looks as if it did not exist."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, insert, select, update

from skyrl.db.database import Database
from skyrl.db.tables import ModelRow, SamplingSessionRow, SessionRow
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.ids import new_session_id

sessions = SessionRow.__table__  # type: ignore[attr-defined]
models = ModelRow.__table__  # type: ignore[attr-defined]
samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]

_INSERT = insert(sessions)
_BEAT = (
    update(sessions)
    .where(sessions.c.id == bindparam("session"), sessions.c.status == "active")
    .values(heartbeat_at=bindparam("now"))
)
_END = (
    update(sessions)
    .where(sessions.c.id == bindparam("session"), sessions.c.status == "active")
    .values(status=bindparam("to"), finish_reason=bindparam("reason"), finish_detail=bindparam("detail"))
)


@dataclass(slots=True)
class Session:
    """A session as the API process keeps it. Times: seconds since the epoch."""

    id: str
    tenant: str
    status: str
    heartbeat_at: float
    user_metadata: dict[str, Any] | None = None


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
            self._known[row.id] = Session(row.id, row.tenant, row.status, self._started_at, row.user_metadata)

    async def create(
        self, tenant: str, tags: list[str], user_metadata: dict[str, Any] | None, sdk_version: str
    ) -> Session:
        now = time.time()
        session = Session(new_session_id(), tenant, "active", now, user_metadata)
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
            session = Session(row.id, row.tenant, row.status, row.heartbeat_at, row.user_metadata)
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
        await self._writer.execute(_END, {"session": session.id, "to": to, "reason": reason, "detail": detail})
        self._known.pop(session.id, None)  # not before: a look-up in between would find it active
        return True

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
