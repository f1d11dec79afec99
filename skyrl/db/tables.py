"""The schema as SQLModel tables. Times are seconds since the epoch, UTC. Alembic makes it from its revisions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
    text,
)
from sqlmodel import Field, SQLModel

from skyrl.db.columns import WeightsText
from skyrl.types.weights import WeightsRef

# SQLite only counts rows up in a column of type INTEGER; PostgreSQL needs 64 bits by name.
_ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")

_ACTIVE, _OPEN_ADAPTER = text("status = 'active'"), text("status = 'active' AND weights <> 'base'")
_CLOSED = text("closed_at IS NOT NULL")
"""Most rows are of closed sampling sessions. Partial indexes hold only the rows that are searched for."""


class SessionRow(SQLModel, table=True):
    """One client process's session; `status` is active, finished or expired. `project_id` is the tenant's own word."""

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
    """One adapter being trained; `status` is creating, ready, failed or closed. `next_seq` is the first command that is
    not in the model's snapshot (0: there is none)."""

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
    next_seq: int = Field(default=1, sa_column=Column(BigInteger, nullable=False))
    created_at: float
    last_request_at: float


class SamplingSessionRow(SQLModel, table=True):
    """What a sampling client samples from. `weights` never changes.

    `status` is active, closed (its session has ended) or dropped (its adapter's files are deleted, see
    `skyrl.db.adapter_versions`). `closed_at` is when it stopped being active. `size_bytes` is the size of the adapter's
    files. `last_used_at` is the time of the last sample, written about once a minute. Both are None for the base model.
    `clones` counts the copies of the client that have asked for a number of their own. `old_directory` is where an
    early version of skyrl put the adapter's files, if that is not the place that follows from the version's name. The
    engine brings them to that place when it starts."""

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


class FutureRow(SQLModel, table=True):
    """One request and its result. `n` orders rows by arrival; `status` is pending, done or failed.

    `owner` is the API process that forwards it; it is not to start before `not_before`, when its tenant's quota has
    room for it."""

    __tablename__ = "futures"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("model_id", "seq_id"),
        UniqueConstraint("sampling_session_id", "sample_seq_id"),
        Index("ix_futures_status_n", "status", "n"),
    )
    n: int | None = Field(default=None, sa_column=Column(_ROW_NUMBER, primary_key=True, autoincrement=True))
    id: str = Field(unique=True)
    kind: str
    tenant: str
    session_id: str = Field(index=True)
    model_id: str | None = None
    seq_id: int | None = Field(default=None, sa_column=Column(BigInteger))
    sampling_session_id: str | None = None
    sample_seq_id: int | None = Field(default=None, sa_column=Column(BigInteger))
    digest: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    body: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    body_format: str
    status: str
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    result_format: str | None = None
    error: str | None = Field(default=None, sa_column=Column(Text))
    error_category: str | None = None
    created_at: float
    completed_at: float | None = Field(default=None, index=True)
    owner: str | None = None
    not_before: float | None = None


class CheckpointRow(SQLModel, table=True):
    """A named save. `kind` is weights (adapter and optimizer), sampler_weights (one adapter version) or
    external_weights (an adapter for download).

    Its files are in the checkpoint store under `store_key`. That is None for sampler weights that were saved before
    there was a checkpoint store, until the engine puts them there. `weights` is what samplers of this checkpoint sample
    from; None where nobody can sample from it. `old_directory` is as that of a sampling session. `copy_key` stands for
    the idempotency key of the request that made this checkpoint as a copy."""

    __tablename__ = "checkpoints"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("model_id", "kind", "name"),)
    id: int | None = Field(default=None, primary_key=True)
    tenant: str = Field(index=True)
    model_id: str
    kind: str
    name: str
    store_key: str | None = None
    weights: WeightsRef | None = Field(default=None, sa_column=Column(WeightsText, index=True))
    old_directory: str | None = None
    copy_key: str | None = Field(default=None, index=True, unique=True)
    base_model: str
    lora_rank: int
    lora_alpha: float
    seed: int = Field(sa_column=Column(BigInteger, nullable=False))
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    size_bytes: int = Field(sa_column=Column(BigInteger, nullable=False))
    public: bool = False
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    created_at: float
    expires_at: float | None = Field(default=None, index=True)


class StoreRow(SQLModel, table=True):
    """A checkpoint store that holds files of this database's checkpoints; `owner` is what it is marked with."""

    __tablename__ = "stores"  # pyright: ignore[reportAssignmentType]
    url: str = Field(primary_key=True)
    owner: str


class EngineStateRow(SQLModel, table=True):
    """The singleton through which the engine tells the API where samples go and whether it can train; `owner` is the
    server whose engine that is, and said so last at `held_at`. `state_dir` is that server's: gateways name the files of
    adapters there to their inference server."""

    __tablename__ = "engine_state"  # pyright: ignore[reportAssignmentType]
    id: int = Field(default=1, primary_key=True)
    inference_proxy_url: str | None = None
    generation: int = 0
    training_ready: bool = False
    reason: str = Field(default="", sa_column=Column(Text, nullable=False))
    vocab_size: int | None = None
    max_context: int | None = None
    heartbeat_at: float = 0.0
    updated_at: float = 0.0
    owner: str | None = None
    held_at: float | None = None
    state_dir: str | None = None


class ApiProcessRow(SQLModel, table=True):
    """An API process that serves this database: whose heartbeat is old is dead, and others forward what it left."""

    __tablename__ = "api_processes"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    started_at: float
    heartbeat_at: float
    sample_clock: int | None = Field(default=None, sa_column=Column(BigInteger))
    """See `skyrl.sampling.fair_order`."""


class QuotaRow(SQLModel, table=True):
    """What a tenant may use, where that is not what the configuration says for all: None is the configuration's."""

    __tablename__ = "quotas"  # pyright: ignore[reportAssignmentType]
    tenant: str = Field(primary_key=True)
    requests_in_flight: int | None = None
    tokens_per_minute: int | None = Field(default=None, sa_column=Column(BigInteger))
    models: int | None = None
    stored_bytes: int | None = Field(default=None, sa_column=Column(BigInteger))
    updated_at: float


class UsageRow(SQLModel, table=True):
    """How much of something a session used in one hour of UTC: tokens, checkpoints, or gigabyte-hours of storage.

    `bucket` is the hour's start; `session_id` is empty for storage, which outlives sessions."""

    __tablename__ = "usage"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        PrimaryKeyConstraint("tenant", "bucket", "session_id", "base_model", "kind"),
        Index("ix_usage_bucket", "bucket"),
    )
    bucket: int = Field(sa_column=Column(BigInteger, nullable=False))
    tenant: str
    session_id: str
    base_model: str
    kind: str
    amount: float


class MeterRow(SQLModel, table=True):
    """Up to when `usage` has what is measured over time, and what each process has counted of its samples."""

    __tablename__ = "meters"  # pyright: ignore[reportAssignmentType]
    name: str = Field(primary_key=True)
    counted_until: float


class AuditEventRow(SQLModel, table=True):
    """Something that happened to a tenant's checkpoints or projects; `event` is `<resource>_<action>`."""

    __tablename__ = "audit_events"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("ix_audit_events_tenant_at", "tenant", "at"),)
    id: int | None = Field(default=None, sa_column=Column(_ROW_NUMBER, primary_key=True, autoincrement=True))
    at: float
    tenant: str
    event: str
    details: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class ApiKeyRow(SQLModel, table=True):
    """An API key that the operator made; `digest` is SHA-256 of it, and `id` the part of it that is no secret.

    `last_used_at` is a minute's start, and written a while after it."""

    __tablename__ = "api_keys"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    digest: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    tenant: str = Field(index=True)
    name: str
    scopes: list[str] = Field(sa_column=Column(JSON, nullable=False))
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None
