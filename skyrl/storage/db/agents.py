"""Agent sessions and their turns.

A session is created, found, listed, ended, rewarded, and deleted by its tenant or some time after its end. A turn is
written once, when its answer is complete, and never changed.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, and_, bindparam, case, delete, func, insert, or_, select, update

from skyrl.base.types.agents import AgentLimits, AgentSession, AgentTurn, EndReason, VersionSpan
from skyrl.base.types.weights import BaseWeights, WeightsRef
from skyrl.storage.db.database import MAX_NAMED, Database, in_groups
from skyrl.storage.db.faults import ConstraintError
from skyrl.storage.db.row_statements import RowStatement, marks
from skyrl.storage.db.run_steps import add_reward
from skyrl.storage.db.tables import AgentSessionRow, AgentTurnRow
from skyrl.storage.db.writer import GroupCommitWriter

turns = AgentTurnRow.__table__  # type: ignore[attr-defined]
sessions = AgentSessionRow.__table__  # type: ignore[attr-defined]

COMPRESSED_BYTES = 1024
"""Content of more bytes is compressed. A token id of a large vocabulary takes 4 bytes, and about 2.5 compressed."""
_PLAIN, _ZSTD = b"\0", b"\1"
_COLUMNS = ("id", "session_id", "parent", "key", "attempt", "ended_at", "added", "sampled", "fork", "content")
_NAMES = ", ".join(_COLUMNS)
_INSERT = f"INSERT INTO agent_turns ({_NAMES}) SELECT"
_OPEN = "EXISTS (SELECT 1 FROM agent_sessions AS s WHERE s.id = {} AND s.ended_at IS NULL)"
_SESSION = "CAST(%(session_id)s AS varchar)"
_ADD = RowStatement(
    _COLUMNS,
    sqlite=f"{_INSERT} {_NAMES} FROM given WHERE id IS NOT NULL AND {_OPEN.format('session_id')}",
    postgres=f"{_INSERT} {marks(_COLUMNS).replace('%(session_id)s', _SESSION)} WHERE {_OPEN.format(_SESSION)}",
    long=("content",),
)
"""Adds nothing to a session that has ended. The write lock decides whether an end or a turn was first."""


class _Content(msgspec.Struct, array_like=True):
    """What has no column of its own. Arrays are little-endian: int32 ids, float32 logprobs. `messages` and `setting`
    are JSON if they are bytes."""

    messages: list[dict[str, Any]] | bytes
    setting: dict[str, Any] | bytes
    added: bytes
    sampled: bytes
    logprobs: bytes
    versions: list[tuple[int, str]]
    answer: dict[str, Any]
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, int]
    dialect: str
    created_at: float
    forked_at: int | None
    routed_experts: bytes | None
    template_note: str | None = None
    constrained: bytes | None = None
    """A bit for each sampled token. Rows of earlier versions lack it, the field before it and the next."""
    own_logprobs: bool = True


_OWN = ("id", "session_id", "parent", "key", "attempt", "ended_at", "fork")
_JSON = ("messages", "setting")
_ALIKE = (*_JSON, "answer", "finish_reason", "stop_reason", "usage", "dialect", "created_at", "forked_at") + (
    "routed_experts", "template_note", "own_logprobs",
)  # fmt: skip
"""The fields of a turn that a row has in a column as they are, and those that the content has as they are."""
T = TypeVar("T")
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Content).decode


class AgentTurns:
    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def add(self, turn: AgentTurn) -> AgentTurn | None:
        """Store a turn, and return it; or the turn that was stored before with the same session, key and attempt. None
        if the session has ended: then nothing is stored. Raises DatabaseError."""
        constraint: ConstraintError | None = None
        try:
            if await self._writer.execute(_ADD, _row(turn)):
                return turn
        except ConstraintError as error:
            constraint = error
        same = (turns.c.session_id == turn.session_id) & (turns.c.key == turn.key)
        query = select(turns).where(same, turns.c.attempt == turn.attempt)
        stored = await self._database.read_async(lambda c: c.execute(query).first())
        if stored is None and constraint is not None:
            raise constraint
        return None if stored is None else _turn(stored)

    async def of(self, session_id: str, after: int = 0) -> tuple[list[AgentTurn], int]:
        """The turns of a session in rows after the number `after`, oldest first, and the number of the last row. Raises
        DatabaseError."""

        def read(connection: Connection) -> tuple[list[AgentTurn], int]:
            query = select(turns).where(turns.c.session_id == session_id, turns.c.n > after).order_by(turns.c.n)
            rows = connection.execute(query).all()
            return [_turn(row) for row in rows], rows[-1].n if rows else after

        return await self._database.read_async(read)

    async def page(self, session_id: str, after: int, limit: int) -> list[tuple[int, AgentTurn]]:
        """The first `limit` turns in rows after the number `after`, oldest first, each with its row's number. Raises
        DatabaseError."""

        def read(connection: Connection) -> list[tuple[int, AgentTurn]]:
            query = select(turns).where(turns.c.session_id == session_id, turns.c.n > after)
            return [(row.n, _turn(row)) for row in connection.execute(query.order_by(turns.c.n).limit(limit))]

        return await self._database.read_async(read)

    async def find(self, session_id: str, turn_id: str) -> AgentTurn | None:
        """Raises DatabaseError."""
        query = select(turns).where(turns.c.session_id == session_id, turns.c.id == turn_id)
        row = await self._database.read_async(lambda c: c.execute(query).first())
        return None if row is None else _turn(row)


def _row(turn: AgentTurn) -> dict[str, Any]:
    content = _packed(
        _Content(
            **{name: getattr(turn, name) for name in _ALIKE},
            added=turn.added.astype("<i4").tobytes(),
            sampled=turn.sampled.astype("<i4").tobytes(),
            logprobs=turn.logprobs.astype("<f4").tobytes(),
            versions=[(span.first, span.version) for span in turn.versions],
            constrained=None if turn.constrained is None else np.packbits(turn.constrained).tobytes(),
        )
    )
    long = len(content) > COMPRESSED_BYTES
    return {name: getattr(turn, name) for name in _OWN} | {
        "added": len(turn.added),
        "sampled": len(turn.sampled),
        "content": _ZSTD + zstandard.ZstdCompressor(level=1).compress(content) if long else _PLAIN + content,
    }


def _packed(content: _Content) -> bytes:
    try:
        return _encode(content)
    except OverflowError:
        content.messages, content.setting = map(msgspec.json.encode, (content.messages, content.setting))
        return _encode(content)


def _turn(row: Any) -> AgentTurn:
    stored: bytes = row.content
    packed = stored[1:] if stored[:1] == _PLAIN else zstandard.ZstdDecompressor().decompress(stored[1:])
    content = _decode(packed)
    return AgentTurn(
        **{name: getattr(row, name) for name in _OWN},
        **{name: _given(getattr(content, name)) if name in _JSON else getattr(content, name) for name in _ALIKE},
        added=np.frombuffer(content.added, "<i4"),
        sampled=np.frombuffer(content.sampled, "<i4"),
        logprobs=np.frombuffer(content.logprobs, "<f4"),
        versions=tuple(VersionSpan(first, version) for first, version in content.versions),
        constrained=None if content.constrained is None else _bits(content.constrained, len(content.sampled) // 4),
    )


def _bits(packed: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(np.bool_)


def _given(value: T | bytes) -> T:
    if isinstance(value, bytes):
        given: T = msgspec.json.decode(value)
        return given
    return value


SessionState = Literal["open", "ended"]
FORGET_SESSIONS, FORGET_TURNS, FORGET_BYTES = 20, 250, 4 * 2**20
"""The most rows, and bytes of turns, that one step of `forget` deletes."""
DELETED = 0.0
"""The end of a session that its tenant has deleted. Like every session whose time is over it is found no more, and the
sweep deletes it first."""
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
        """None for one that its tenant has deleted."""
        query = select(sessions).where(sessions.c.id == session_id, sessions.c.ended_at.is_distinct_from(DELETED))
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

    async def delete(self, session_id: str) -> None:
        """Let the next sweep delete a session that has ended, with its turns (`forget`)."""
        ended = and_(sessions.c.id == session_id, sessions.c.ended_at.is_not(None))
        statement = update(sessions).where(ended).values(ended_at=DELETED)
        await self._writer.transact(lambda c: c.execute(statement).rowcount)

    async def end_over(self, now: float, limit: int = MAX_NAMED, *, idle_since: float = 0.0) -> Counter[EndReason]:
        """End at most `limit` open sessions whose time is over or that were idle for too long. Returns how many, by
        reason: of several processes that do this, one counts a session. Whether a session was idle is known USES_LATE_S
        later. Time before `idle_since` counts as used. Times in seconds since the epoch."""
        return await self._writer.transact(lambda c: _end_over(c, now, limit, idle_since))

    async def reward(self, session_id: str, tenant: str, reward: float) -> bool:
        """Give a session its reward, in place of an earlier one. The first one also counts for the open step of the
        run whose weights it has, if that is the tenant's own. False if the tenant has no such session."""
        found = sessions.c.ended_at.is_distinct_from(DELETED)
        own = and_(sessions.c.id == session_id, sessions.c.tenant == tenant, found)
        before = select(sessions.c.weights, sessions.c.reward).where(own)

        def change(connection: Connection) -> bool:
            row = connection.execute(before).first()
            if row is None:
                return False
            connection.execute(update(sessions).where(own).values(reward=reward))
            if row.reward is None and not isinstance(row.weights, BaseWeights):
                add_reward(connection, row.weights.model_id, tenant, reward)
            return True

        return await self._writer.transact(change)

    def note_use(self, session_id: str) -> None:
        """A turn was asked for. `write_uses` writes that later, for many sessions at once."""
        self._used.add(session_id)

    async def write_uses(self) -> None:
        """Call it about once a minute."""
        used, self._used = sorted(self._used), set()
        now = time.time()
        statement = update(sessions).where(sessions.c.id.in_(bindparam("ids", expanding=True))).values(used_at=now)
        try:
            for some in in_groups(used):
                await self._writer.transact(lambda c, ids=some: c.execute(statement, {"ids": ids}).rowcount)
        except BaseException:
            self._used.update(used)
            raise


def _end_over(connection: Connection, now: float, limit: int, idle_since: float) -> Counter[EndReason]:
    over = sessions.c.created_at + sessions.c.limits["seconds"].as_float() <= now
    idle_s, known_until = sessions.c.limits["idle_s"].as_float(), now - USES_LATE_S
    idle = and_(sessions.c.used_at + idle_s <= known_until, idle_s <= known_until - idle_since)
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
    return and_(sessions.c.tenant == tenant, wanted, sessions.c.ended_at.is_distinct_from(DELETED))


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
    values = dict(row._mapping) | {"limits": AgentLimits(**row.limits)} | row.options
    del values["options"]
    return AgentSession(**values)
