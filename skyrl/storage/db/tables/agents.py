"""Sessions of agents, and their turns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Column, Index, LargeBinary, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from skyrl.base.types.weights import WeightsRef
from skyrl.storage.db.columns import ROW_NUMBER, WeightsText

_NOT_ENDED = text("ended_at IS NULL")
"""The condition of a partial index, which contains only rows that are searched for by it."""


class AgentSessionRow(SQLModel, table=True):
    """A session of an agent (`skyrl.base.types.agents`). `limits` and `options` are JSON. `ended_at` is None while it
    takes requests."""

    __tablename__ = "agent_sessions"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index("ix_agent_sessions_tenant", "tenant", "created_at"),
        Index("ix_agent_sessions_open", "tenant", sqlite_where=_NOT_ENDED, postgresql_where=_NOT_ENDED),
        Index("ix_agent_sessions_ended_at", "ended_at"),
    )
    id: str = Field(primary_key=True)
    tenant: str
    name: str
    model: str
    base_model: str
    weights: WeightsRef = Field(sa_column=Column(WeightsText, nullable=False))
    follows: str
    limits: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    options: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    created_at: float
    used_at: float
    ended_at: float | None = None
    end_reason: str | None = None
    reward: float | None = None


class AgentTurnRow(SQLModel, table=True):
    """A turn of an agent's session. `added` and `sampled` are numbers of tokens; `content` holds the rest of the turn,
    see `skyrl.storage.db.agent_turns`. Of two turns with the same session, key and attempt the first one stays."""

    __tablename__ = "agent_turns"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("session_id", "key", "attempt"),)
    n: int | None = Field(default=None, sa_column=Column(ROW_NUMBER, primary_key=True, autoincrement=True))
    id: str
    session_id: str = Field(index=True)
    parent: str | None = None
    key: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    attempt: int
    ended_at: float
    added: int
    sampled: int
    fork: str | None = None
    content: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
