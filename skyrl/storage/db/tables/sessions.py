"""Sessions of clients, and what each has on the server: models in training with their steps, and sampling sessions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Index, Integer, PrimaryKeyConstraint, Text, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from skyrl.base.types.weights import WeightsRef
from skyrl.storage.db.columns import WeightsText

_ACTIVE, _OPEN_ADAPTER = text("status = 'active'"), text("status = 'active' AND weights <> 'base'")
_CLOSED = text("closed_at IS NOT NULL")
"""Conditions of partial indexes. Each index contains only rows that are searched for by it."""


class SessionRow(SQLModel, table=True):
    """A session of one client process. `status` is active, finished or expired. The tenant chooses `project_id`."""

    __tablename__ = "sessions"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("ix_sessions_active_tenant", "tenant", sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),)
    id: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    status: str = Field(index=True)
    created_at: float
    heartbeat_at: float
    finish_reason: str | None = None
    finish_detail: str | None = Field(default=None, sa_column=Column(Text))
    sdk_version: str = ""
    tags: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    project_id: str | None = None
    display_name: str | None = None
    ended_at: float | None = None


class ModelRow(SQLModel, table=True):
    """One adapter in training. `status` is creating, ready, failed or closed. `next_seq` is the number of the first
    command that is not in the model's last snapshot; 0 means that there is no snapshot. `steps` counts the optimizer
    steps that succeeded. `sampler_version` is the newest saved version. `versions_taken` is the highest number that a
    save has taken where versions go to the checkpoint store; there a save takes its number before it writes files."""

    __tablename__ = "models"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    session_id: str = Field(index=True, foreign_key="sessions.id")
    tenant: str = Field(index=True)
    model_seq_id: int
    base_model: str
    status: str = Field(index=True)
    lora_rank: int
    lora_alpha: float
    seed: int = Field(sa_column=Column(BigInteger, nullable=False))
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    sampler_version: int = 0
    versions_taken: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    next_seq: int = Field(default=1, sa_column=Column(BigInteger, nullable=False))
    steps: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    created_at: float
    last_request_at: float


class RunStepRow(SQLModel, table=True):
    """One step of a model's training: sums over the forward_backward passes since the step before. `ended_at` is when
    the optimizer step ended; None while the step is open. `busy_s` is the trainer's time. The sums of the gap,
    of the ratio and of clipped tokens are weighted by tokens. See `skyrl.storage.db.run_steps`."""

    __tablename__ = "run_steps"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (PrimaryKeyConstraint("model_id", "step"), Index("ix_run_steps_updated_at", "updated_at"))
    model_id: str
    step: int = Field(sa_column=Column(BigInteger, nullable=False))
    updated_at: float
    ended_at: float | None = None
    passes: int
    tokens: int = Field(sa_column=Column(BigInteger, nullable=False))
    loss_sum: float
    loss_weight: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    gap_sum: float
    gap_tokens: int = Field(sa_column=Column(BigInteger, nullable=False))
    clipped_sum: float
    clipped_tokens: int = Field(sa_column=Column(BigInteger, nullable=False))
    ratio_sum: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    ratio_tokens: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    learning_rate: float | None = None
    busy_s: float


class SamplingSessionRow(SQLModel, table=True):
    """A sampling session: the `weights` from which a sampling client samples. They never change.

    `status` is active, closed (the session has ended) or dropped (the adapter's files are deleted, see
    `skyrl.storage.db.adapter_versions`). `closed_at` is when the status stopped being active. `size_bytes` is the size
    of the adapter's files. `last_used_at` is the time of the last sample, written about once a minute. Both are None
    for the base model. `clones` counts the copies of the client that have asked for a number.

    `old_directory` is where an early version of skyrl has put the adapter's files, if that is not the directory that
    follows from the version's name. When the engine starts, it brings them to that directory."""

    __tablename__ = "sampling_sessions"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("session_id", "seq_id"),
        Index("ix_sampling_sessions_open", "session_id", sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),
        Index(
            "ix_sampling_sessions_idle",
            "last_used_at",
            "weights",
            sqlite_where=_OPEN_ADAPTER,
            postgresql_where=_OPEN_ADAPTER,
        ),
        Index("ix_sampling_sessions_closed_at", "closed_at", sqlite_where=_CLOSED, postgresql_where=_CLOSED),
    )
    id: str = Field(primary_key=True)
    session_id: str = Field(index=True, foreign_key="sessions.id")
    tenant: str
    seq_id: int
    base_model: str
    model_path: str | None = None
    weights: WeightsRef = Field(sa_column=Column(WeightsText, nullable=False, index=True, server_default="base"))
    old_directory: str | None = None
    status: str
    created_at: float
    clones: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    size_bytes: int | None = Field(default=None, sa_column=Column(BigInteger))
    last_used_at: float | None = None
    closed_at: float | None = None
