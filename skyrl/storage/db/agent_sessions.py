"""Agent sessions: created, found, listed, ended, rewarded, and deleted some time after their end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Select, and_, bindparam, case, delete, func, insert, or_, select, update

from skyrl.base.types.agent_reasons import EndReason
from skyrl.base.types.agents import AgentLimits, AgentSession
from skyrl.base.types.weights import WeightsRef
from skyrl.storage.db.agent_turns import turns
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import MAX_NAMED
from skyrl.storage.db.tables.agents import AgentSessionRow
from skyrl.storage.db.writer import GroupCommitWriter

sessions = AgentSessionRow.__table__  # type: ignore[attr-defined]

SessionState = Literal["open", "ended"]
FORGET_SESSIONS, FORGET_TURNS, FORGET_BYTES = 20, 250, 4 * 2**20
"""The most rows, and bytes of turns, that one step of `forget` deletes."""
USES_LATE_S = 120.0
"""How old `used_at` may be beyond the last use: each process writes it about once a minute."""
_OPTIONS = ("sampling", "metadata", "keep_thinking", "routed_experts")


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the turns of a session. `added` and `sampled` are tokens."""

    turns: int = 0
    added: int = 0
    sampled: int = 0
    forks: int = 0


class AgentSessions:
    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._used: set[str] = set()

    async def create(self, session: AgentSession, most_open: int) -> bool:
        """Add a session. False if its tenant has `most_open` sessions that have not ended."""

        def add(connection: Connection) -> bool:
            open_now = select(func.count()).where(sessions.c.tenant == session.tenant, sessions.c.ended_at.is_(None))
            if connection.execute(open_now).scalar_one() >= most_open:
                return False
            connection.execute(insert(sessions), _values(session))
            return True

        return await self._writer.transact(add)

    async def find(self, session_id: str) -> AgentSession | None:
        query = select(sessions).where(sessions.c.id == session_id)
        row = await self._database.read_async(lambda c: c.execute(query).first())
        return None if row is None else _session(row)

    async def counts(self, session_ids: list[str]) -> dict[str, Counts]:
        """By id; sessions without a turn are left out."""
        return await self._database.read_async(lambda c: _counts(c, session_ids))

    async def page(
        self, tenant: str, limit: int, offset: int, state: SessionState | None = None
    ) -> tuple[list[tuple[AgentSession, Counts]], int]:
        """A tenant's sessions, newest first, and how many there are."""

        def read(connection: Connection) -> tuple[list[tuple[AgentSession, Counts]], int]:
            shown = _shown(tenant, state)
            found = [
                _session(row)
                for row in connection.execute(
                    select(sessions)
                    .where(shown)
                    .order_by(sessions.c.created_at.desc(), sessions.c.id)
                    .limit(limit)
                    .offset(offset)
                )
            ]
            counts = _counts(connection, [session.id for session in found])
            total = connection.execute(select(func.count()).select_from(sessions).where(shown)).scalar_one()
            return [(session, counts.get(session.id, Counts())) for session in found], total

        return await self._database.read_async(read)

    async def end(self, session_id: str, reason: EndReason, now: float) -> bool:
        """False if it has ended before, or there is none."""
        open_one = and_(sessions.c.id == session_id, sessions.c.ended_at.is_(None))
        statement = update(sessions).where(open_one).values(ended_at=now, end_reason=reason)
        return await self._writer.transact(lambda c: c.execute(statement).rowcount > 0)

    async def end_over(self, now: float, limit: int = MAX_NAMED) -> Counter[EndReason]:
        """End at most `limit` open sessions whose time is over or that were idle for too long. Returns how many, by
        reason: of several processes that do this, one counts a session. Whether a session was idle is known USES_LATE_S
        later."""
        return await self._writer.transact(lambda c: _end_over(c, now, limit))

    async def reward(self, session_id: str, tenant: str, reward: float) -> bool:
        """Give a session its reward, in place of an earlier one. False if the tenant has no such session."""
        own = and_(sessions.c.id == session_id, sessions.c.tenant == tenant)
        statement = update(sessions).where(own).values(reward=reward)
        return await self._writer.transact(lambda c: c.execute(statement).rowcount > 0)

    def note_use(self, session_id: str) -> None:
        """A turn was asked for. `write_uses` writes that later, for many sessions at once."""
        self._used.add(session_id)

    async def write_uses(self) -> None:
        """Call it about once a minute."""
        used, self._used = sorted(self._used), set()
        now = time.time()
        statement = update(sessions).where(sessions.c.id.in_(bindparam("ids", expanding=True))).values(used_at=now)
        try:
            for start in range(0, len(used), MAX_NAMED):
                some = used[start : start + MAX_NAMED]
                await self._writer.transact(lambda c, ids=some: c.execute(statement, {"ids": ids}).rowcount)
        except BaseException:
            self._used.update(used)
            raise


def _end_over(connection: Connection, now: float, limit: int) -> Counter[EndReason]:
    over = sessions.c.created_at + sessions.c.limits["seconds"].as_float() <= now
    idle = sessions.c.used_at + sessions.c.limits["idle_s"].as_float() <= now - USES_LATE_S
    found = select(sessions.c.id).where(sessions.c.ended_at.is_(None), or_(over, idle)).limit(limit)
    values = {"ended_at": now, "end_reason": case((over, "time"), else_="idle")}
    ended = update(sessions).where(sessions.c.id.in_(found)).values(values).returning(sessions.c.end_reason)
    return Counter(connection.execute(ended).scalars())


def forget(connection: Connection, ended_before: float) -> int:
    """Delete turns of sessions that ended before this time, and sessions that have no turns any more: at most
    FORGET_TURNS turns of FORGET_SESSIONS sessions, of about FORGET_BYTES together. Returns the number of deleted rows;
    0 when none is left."""
    over = select(sessions.c.id).where(sessions.c.ended_at < ended_before).order_by(sessions.c.ended_at)
    ids = list(connection.execute(over.limit(FORGET_SESSIONS)).scalars())
    if not ids:
        return 0
    # Neither database reads the content to get its length.
    rows = select(turns.c.n, func.length(turns.c.content)).where(turns.c.session_id.in_(ids)).limit(FORGET_TURNS)
    numbers: list[int] = []
    total_bytes = 0
    for number, content_bytes in connection.execute(rows).all():
        numbers.append(number)
        total_bytes += content_bytes
        if total_bytes >= FORGET_BYTES:
            break
    if numbers:
        return connection.execute(delete(turns).where(turns.c.n.in_(numbers))).rowcount
    return connection.execute(delete(sessions).where(sessions.c.id.in_(ids))).rowcount


def pinned() -> Select[WeightsRef]:
    """The weights that open sessions are pinned to."""
    return select(sessions.c.weights).where(
        sessions.c.ended_at.is_(None), sessions.c.follows == "pinned", sessions.c.weights != "base"
    )


def _shown(tenant: str, state: SessionState | None) -> Any:
    ended = sessions.c.ended_at.is_not(None)
    wanted = or_(ended, ~ended) if state is None else ended if state == "ended" else ~ended
    return and_(sessions.c.tenant == tenant, wanted)


def _counts(connection: Connection, session_ids: list[str]) -> dict[str, Counts]:
    sums = (func.count(), func.sum(turns.c.added), func.sum(turns.c.sampled), func.count(turns.c.fork))
    query = select(turns.c.session_id, *sums).where(turns.c.session_id.in_(session_ids)).group_by(turns.c.session_id)
    found = connection.execute(query)
    return {session_id: Counts(*(int(each) for each in sums)) for session_id, *sums in found}


def _values(session: AgentSession) -> dict[str, Any]:
    values = asdict(session)
    return {
        **{column.key: values[column.key] for column in sessions.c if column.key not in ("options", "weights")},
        "weights": session.weights,
        "options": {name: values[name] for name in _OPTIONS},
    }


def _session(row: Any) -> AgentSession:
    return AgentSession(
        id=row.id,
        tenant=row.tenant,
        name=row.name,
        model=row.model,
        base_model=row.base_model,
        weights=row.weights,
        follows=row.follows,
        limits=AgentLimits(**row.limits),
        created_at=row.created_at,
        used_at=row.used_at,
        ended_at=row.ended_at,
        end_reason=row.end_reason,
        reward=row.reward,
        **row.options,
    )
