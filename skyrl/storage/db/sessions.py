"""Creates, finds, keeps alive and ends sessions. Caches active sessions in memory. A tenant finds only its own.

`SilenceWatch` decides which sessions have fallen silent, from the few rows whose last heartbeat is old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, bindparam, insert, literal_column, select, update

from skyrl.base.types.requests import new_session_id
from skyrl.base.wire.errors import NotFound
from skyrl.storage.db import audit
from skyrl.storage.db.database import Database, in_groups
from skyrl.storage.db.row_caches import BatchedRows
from skyrl.storage.db.row_statements import RowStatement
from skyrl.storage.db.tables import ModelRow, SamplingSessionRow, SessionRow
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.notices import PeerNotifier

LONG_LOOK_S = 20.0
"""If the time between two looks is longer, looks have failed or the process was stopped."""

WATCHED = 0.5
"""The part of the timeout for which a row is watched. Before that, its heartbeat must be older than the rest of the
timeout by this process's clock. So a wrong clock ends no session before it was watched for this part."""


class Continuity:
    """How long this process has run without a gap. A gap is a start, a time in which the process was stopped, its
    machine suspended or the database away, or a clock that was set. Clients could do nothing then, or their times are
    wrong: what is missing from a gap does not count as their silence."""

    def __init__(self) -> None:
        self._since = self._looked_at = time.monotonic()
        self._offset = time.time() - self._looked_at

    @property
    def seconds(self) -> float:
        """Since the last gap; 0 in one."""
        now = time.monotonic()
        is_gap = now - self._looked_at > LONG_LOOK_S or abs(time.time() - now - self._offset) > LONG_LOOK_S
        return 0.0 if is_gap else now - self._since

    def look(self) -> float:
        """`seconds`, and note that all is well now: the database has just answered. Between two calls must be less than
        LONG_LOOK_S, or that time counts as a gap."""
        now, seconds = time.monotonic(), self.seconds
        self._since, self._looked_at, self._offset = now - seconds, now, time.time() - now
        return seconds


class SilenceWatch:
    """The watched sessions of one API process. No session is silent for a whole timeout after a gap."""

    def __init__(self, continuity: Continuity) -> None:
        self._watched: dict[str, tuple[float, float]] = {}
        """By session: its last heartbeat, and the monotonic time since which it has been the same."""
        self._continuity = continuity

    @staticmethod
    def oldest_fresh(timeout_s: float) -> float:
        """Rows whose last heartbeat is not later (seconds since the epoch) are to be watched."""
        return time.time() - timeout_s * (1 - WATCHED)

    def look(self, old: Mapping[str, float], timeout_s: float) -> tuple[list[str], list[str]]:
        """`old` has the last heartbeats of all active sessions that are to be watched. Returns the ids of those that
        are silent, and of those that were watched until now and are not in `old` any more: they have sent a heartbeat,
        or have ended."""
        now, without_gap_s = time.monotonic(), self._continuity.look()
        before, self._watched = self._watched, {}
        silent: list[str] = []
        for session_id, heartbeat_at in old.items():
            last, since = before.pop(session_id, (None, now))
            since = since if last == heartbeat_at else now
            self._watched[session_id] = (heartbeat_at, since)
            if now - since >= timeout_s * WATCHED and without_gap_s >= timeout_s:
                silent.append(session_id)
        return silent, list(before)


sessions = SessionRow.__table__  # type: ignore[attr-defined]
models = ModelRow.__table__  # type: ignore[attr-defined]
samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]

NEWEST_FIRST = sessions.c.created_at.desc(), sessions.c.id.desc()
"""The order of an index, as in lists of checkpoints and of models."""

DEFAULT_PROJECT = "default"
"""The project of sessions that were not put into a project."""

COMPARE_S = 60.0
"""How often `look` compares all sessions in memory with the database, in case a notice was lost."""

_INSERT = insert(sessions)
_IS_ACTIVE = sessions.c.status == literal_column("'active'")
_OLD = select(sessions.c.id, sessions.c.tenant, sessions.c.heartbeat_at).where(
    _IS_ACTIVE, sessions.c.heartbeat_at <= bindparam("oldest_fresh")
)
_ACTIVE = select(sessions.c.id, sessions.c.project_id).where(_IS_ACTIVE)
"""Without the sessions' metadata, which may be 16 KiB for each of thousands of sessions."""
_BEAT = RowStatement(
    ("session", "now"),
    sqlite="UPDATE sessions SET heartbeat_at = now FROM given WHERE sessions.id = session AND +status = 'active'",
    postgres="UPDATE sessions SET heartbeat_at = %(now)s WHERE id = %(session)s AND status = 'active'",
    first_of="session",
)
"""Nothing for a session that has ended. (The plus: see `skyrl.storage.db.futures.SETTLE`.)"""
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
    """A session in the memory of an API process. `notes` is its user metadata as JSON, which takes a tenth of the
    memory of the decoded metadata."""

    id: str
    tenant: str
    status: str
    notes: bytes | None = None
    project_id: str | None = None
    display_name: str | None = None

    @property
    def user_metadata(self) -> dict[str, Any] | None:
        return None if self.notes is None else msgspec.json.decode(self.notes)


def _notes(user_metadata: dict[str, Any] | None) -> bytes | None:
    return None if user_metadata is None else msgspec.json.encode(user_metadata)


def _session(row: Any) -> Session:
    return Session(row.id, row.tenant, row.status, _notes(row.user_metadata), row.project_id, row.display_name)


def active_sessions_of(tenant: str) -> ColumnElement[bool]:
    """The condition that a session is active and belongs to the tenant. The status is a literal and no parameter,
    because SQLite uses the partial index of active sessions only if the query's text contains it."""
    return (sessions.c.tenant == tenant) & (sessions.c.status == literal_column("'active'"))


def in_project(project_id: str) -> ColumnElement[bool]:
    """The condition that a session belongs to a project."""
    named = sessions.c.project_id == project_id
    return named | sessions.c.project_id.is_(None) if project_id == DEFAULT_PROJECT else named


@dataclass(frozen=True, slots=True)
class Look:
    """The result of `Sessions.look`. `silent`: active sessions without a heartbeat for too long, each with the time of
    its last heartbeat. `ended`: ids of sessions that another process has ended."""

    silent: list[tuple[Session, float]]
    ended: list[str]


class Sessions:
    """The sessions of one database, in one API process.

    Other processes tell which sessions they have ended or changed. `look` finds what was not told, and silent sessions.
    """

    def __init__(
        self,
        database: Database,
        writer: GroupCommitWriter,
        notifier: PeerNotifier | None = None,
        continuity: Continuity | None = None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._notifier = notifier or PeerNotifier()
        self._known: dict[str, Session] = {}
        self._silence = SilenceWatch(continuity or Continuity())
        self._compared_at = float("-inf")
        self._rows = BatchedRows(self._read)

    async def _read(self, ids: list[str]) -> dict[str, Session]:
        named = select(sessions).where(sessions.c.id.in_(ids))
        return await self._database.read_async(lambda c: {row.id: _session(row) for row in c.execute(named)})

    async def create(
        self,
        tenant: str,
        tags: list[str],
        user_metadata: dict[str, Any] | None,
        sdk_version: str,
        *,
        project_id: str | None = None,
        display_name: str | None = None,
        check: Callable[[Connection], None] | None = None,
    ) -> Session:
        """Add a session. `check` runs in the same transaction; when it raises, no session is added."""
        now = time.time()
        session = Session(new_session_id(), tenant, "active", _notes(user_metadata), project_id, display_name)
        values = {
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
        }

        def add(connection: Connection) -> None:
            if check is not None:
                check(connection)
            connection.execute(_INSERT, values)

        await self._writer.transact(add)
        self._known[session.id] = session
        return session

    async def find(self, session_id: str, tenant: str) -> Session | None:
        """The tenant's session, active or not."""
        session = self._known.get(session_id)
        if session is None:
            session = await self._rows.get(session_id)
            if session is None:
                return None
            if session.status == "active":
                self._known[session_id] = session
        return session if session.tenant == tenant else None

    async def named(self, session_id: str, tenant: str) -> Session:
        """As `find`. Raises NotFound."""
        if (session := await self.find(session_id, tenant)) is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        return session

    async def beat(self, session: Session) -> None:
        await self._writer.execute(_BEAT, {"session": session.id, "now": time.time()})

    async def end(
        self,
        session: Session,
        to: str,
        reason: str | None,
        detail: str | None,
        *,
        silent_since: float | None = None,
    ) -> bool:
        """Mark a session as finished or expired (`to`). With `silent_since`, only if that is still its last heartbeat.
        Returns False if the session had ended before, or has sent a heartbeat since."""
        if session.status != "active":
            return False
        session.status = to  # before the write, so that no request starts in the session meanwhile
        ending = {"session": session.id, "to": to, "reason": reason, "detail": detail, "at": time.time()}
        end = _END if silent_since is None else _END.where(sessions.c.heartbeat_at == silent_since)
        ended = False
        try:
            ended = await self._writer.transact(lambda c: c.execute(end, ending).rowcount == 1)
        finally:
            if not ended:
                session.status = "active"  # if the commit succeeded all the same, the next `look` finds that out
        if ended:
            self.forget(session.id)  # after the commit: before it, `find` would cache the session as active again
            self._notifier.session_changed(session.id)
        return ended

    def forget(self, session_id: str) -> None:
        """Drop an ended session from memory."""
        self._known.pop(session_id, None)

    async def assign_project(self, session: Session, project_id: str) -> None:
        """Move an active or ended session, with everything in it, into a project. Adds an event to the audit log."""

        def assign(connection: Connection) -> None:
            previous = connection.execute(select(sessions.c.project_id).where(sessions.c.id == session.id)).scalar_one()
            connection.execute(update(sessions).where(sessions.c.id == session.id).values(project_id=project_id))
            if previous != project_id:
                audit.record(
                    connection,
                    session.tenant,
                    "project_session_assigned",
                    session_id=session.id,
                    project_id=project_id,
                    previous_project_id=previous,
                )

        await self._writer.transact(assign)
        session.project_id = project_id
        self._notifier.session_changed(session.id)

    async def look(self, timeout_s: float) -> Look:
        """Find the sessions without a heartbeat for `timeout_s` seconds, and those that another process has ended.

        Reads only sessions without a heartbeat for some time, and every COMPARE_S the ids of all active sessions."""
        oldest_fresh = {"oldest_fresh": self._silence.oldest_fresh(timeout_s)}
        old = {row.id: row for row in await self._database.read_async(lambda c: c.execute(_OLD, oldest_fresh).all())}
        silent, unwatched = self._silence.look({row.id: row.heartbeat_at for row in old.values()}, timeout_s)
        ended = await self._ended_of([session_id for session_id in unwatched if session_id in self._known])
        if time.monotonic() - self._compared_at >= COMPARE_S:
            self._compared_at = time.monotonic()
            ended += await self._compare()
        rows = [old[session_id] for session_id in silent]
        found = [(await self.find(row.id, row.tenant), row.heartbeat_at) for row in rows]
        return Look([(session, heartbeat_at) for session, heartbeat_at in found if session is not None], ended)

    async def _ended_of(self, session_ids: list[str]) -> list[str]:
        ended: list[str] = []
        for some in in_groups(session_ids):
            query = select(sessions.c.id).where(sessions.c.id.in_(some), sessions.c.status != "active")
            ended += await self._database.read_async(lambda c, query=query: list(c.execute(query).scalars()))
        return ended

    async def _compare(self) -> list[str]:
        """Take over changed projects of the sessions in memory. Returns the ids of those that are not active. The
        reading thread compares, because the event loop would stand still meanwhile."""
        known = dict(self._known)

        def compare(connection: Connection) -> tuple[list[str], list[tuple[str, str | None]]]:
            active: dict[str, str | None] = {row.id: row.project_id for row in connection.execute(_ACTIVE)}
            ended = [session_id for session_id in known if session_id not in active]
            moved = [
                (each.id, active[each.id])
                for each in known.values()
                if each.id in active and active[each.id] != each.project_id
            ]
            return ended, moved

        ended, moved = await self._database.read_async(compare)
        for session_id, project_id in moved:
            known[session_id].project_id = project_id
        return ended

    async def reread(self, session_id: str) -> bool:
        """Read a session that another process has changed. Returns whether it has ended."""
        one = select(sessions).where(sessions.c.id == session_id)
        row = await self._database.read_async(lambda c: c.execute(one).first())
        if row is not None and (session := self._known.get(session_id)) is not None:
            session.project_id = row.project_id
        return row is not None and row.status != "active"

    async def list_ids(self, tenant: str, limit: int, offset: int) -> list[str]:
        """Ids of a tenant's sessions, newest first."""
        query = select(sessions.c.id).where(sessions.c.tenant == tenant).order_by(*NEWEST_FIRST)
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

    async def base_models(self, session_id: str) -> tuple[set[str], set[str]]:
        """The names of the base models that the session has trained, and of those that it has sampled from."""
        queries = [
            select(table.c.base_model).where(table.c.session_id == session_id).distinct()
            for table in (models, samplers)
        ]
        trained, sampled = await self._database.read_async(
            lambda c: [{row.base_model for row in c.execute(query)} for query in queries]
        )
        return trained, sampled
