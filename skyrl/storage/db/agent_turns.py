"""The turns of agent sessions: each is written once, when its answer is complete, and never changed.

The content of a row is MessagePack, compressed with Zstandard if it is long. What MessagePack cannot hold of a client's
JSON, integers of more than 64 bits, is in it as JSON.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, insert, select

from skyrl.base.types.agent_reasons import ForkReason
from skyrl.base.types.agents import AgentTurn, VersionSpan
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import ConstraintError
from skyrl.storage.db.row_statement import RowStatement
from skyrl.storage.db.tables.agents import AgentSessionRow, AgentTurnRow
from skyrl.storage.db.writer import GroupCommitWriter

turns = AgentTurnRow.__table__  # type: ignore[attr-defined]
sessions = AgentSessionRow.__table__  # type: ignore[attr-defined]

COMPRESSED_BYTES = 1024
"""Content of more bytes is compressed. A token id of a large vocabulary takes 4 bytes, and about 2.5 compressed."""
_PLAIN, _ZSTD = b"\0", b"\1"
_COLUMNS = ("id", "session_id", "parent", "key", "attempt", "ended_at", "added", "sampled", "fork", "content")
_NAMES = ", ".join(_COLUMNS)
_OPEN = "EXISTS (SELECT 1 FROM agent_sessions AS s WHERE s.id = session_id AND s.ended_at IS NULL)"
_ADD = RowStatement(
    insert(turns).from_select(
        _COLUMNS,
        select(
            *(sessions.c.id if name == "session_id" else bindparam(name, type_=turns.c[name].type) for name in _COLUMNS)
        ).where(sessions.c.id == bindparam("session_id"), sessions.c.ended_at.is_(None)),
    ),
    many=f"INSERT INTO agent_turns ({_NAMES}) SELECT {_NAMES} FROM given WHERE id IS NOT NULL AND {_OPEN}",
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
            messages=turn.messages,
            setting=turn.setting,
            added=turn.added.astype("<i4").tobytes(),
            sampled=turn.sampled.astype("<i4").tobytes(),
            logprobs=turn.logprobs.astype("<f4").tobytes(),
            versions=[(span.first, span.version) for span in turn.versions],
            answer=turn.answer,
            finish_reason=turn.finish_reason,
            stop_reason=turn.stop_reason,
            usage=turn.usage,
            dialect=turn.dialect,
            created_at=turn.created_at,
            forked_at=turn.forked_at,
            routed_experts=turn.routed_experts,
            template_note=turn.template_note,
            constrained=None if turn.constrained is None else np.packbits(turn.constrained).tobytes(),
            own_logprobs=turn.own_logprobs,
        )
    )
    long = len(content) > COMPRESSED_BYTES
    return {
        "id": turn.id,
        "session_id": turn.session_id,
        "parent": turn.parent,
        "key": turn.key,
        "attempt": turn.attempt,
        "ended_at": turn.ended_at,
        "added": len(turn.added),
        "sampled": len(turn.sampled),
        "fork": turn.fork,
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
    fork: ForkReason | None = row.fork
    return AgentTurn(
        id=row.id,
        session_id=row.session_id,
        parent=row.parent,
        key=row.key,
        attempt=row.attempt,
        messages=_given(content.messages),
        setting=_given(content.setting),
        added=np.frombuffer(content.added, "<i4"),
        sampled=np.frombuffer(content.sampled, "<i4"),
        logprobs=np.frombuffer(content.logprobs, "<f4"),
        versions=tuple(VersionSpan(first, version) for first, version in content.versions),
        answer=content.answer,
        finish_reason=content.finish_reason,
        stop_reason=content.stop_reason,
        usage=content.usage,
        dialect=content.dialect,
        created_at=content.created_at,
        ended_at=row.ended_at,
        fork=fork,
        forked_at=content.forked_at,
        routed_experts=content.routed_experts,
        template_note=content.template_note,
        constrained=None if content.constrained is None else _bits(content.constrained, len(content.sampled) // 4),
        own_logprobs=content.own_logprobs,
    )


def _bits(packed: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(np.bool_)


def _given(value: T | bytes) -> T:
    if isinstance(value, bytes):
        given: T = msgspec.json.decode(value)
        return given
    return value
