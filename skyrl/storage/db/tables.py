"""The schema as SQLModel tables. Times are in seconds since the epoch. Alembic's revisions make these tables."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlmodel import Field, SQLModel

from skyrl.base.types.weights import WeightsRef
from skyrl.storage.db.client_tables import CustomLossRow as CustomLossRow
from skyrl.storage.db.client_tables import UploadRow as UploadRow
from skyrl.storage.db.columns import ROW_NUMBER, WeightsText
from skyrl.storage.db.run_tables import MeterRow as MeterRow
from skyrl.storage.db.run_tables import RunStepRow as RunStepRow
from skyrl.storage.db.run_tables import UsageRow as UsageRow

_ACTIVE, _OPEN_ADAPTER = text("status = 'active'"), text("status = 'active' AND weights <> 'base'")
_CLOSED = text("closed_at IS NOT NULL")
"""Conditions of partial indexes. Each index contains only rows that are searched for by it."""


class SessionRow(SQLModel, table=True):
    """A session of one client process. `status` is active, finished or expired. The tenant chooses `project_id`."""

    __tablename__ = "sessions"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index("ix_sessions_tenant_created_at", "tenant", "created_at", "id"),
        Index("ix_sessions_active_tenant", "tenant", sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),
    )
    id: str = Field(primary_key=True)
    tenant: str
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
    __table_args__ = (
        Index("ix_models_tenant_created_at", "tenant", "created_at", "id"),
        Index("ix_models_tenant_last_request_at", "tenant", "last_request_at", "id"),
    )
    id: str = Field(primary_key=True)
    session_id: str = Field(index=True, foreign_key="sessions.id")
    tenant: str
    model_seq_id: int
    base_model: str
    status: str = Field(index=True)
    lora_rank: int
    lora_alpha: float
    seed: int = Field(sa_column=Column(BigInteger, nullable=False))
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    rank_pattern: list[tuple[str, int]] | None = Field(default=None, sa_column=Column(JSON(none_as_null=True)))
    value_head: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=false()))
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    sampler_version: int = 0
    versions_taken: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    next_seq: int = Field(default=1, sa_column=Column(BigInteger, nullable=False))
    steps: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    created_at: float
    last_request_at: float


class SamplingSessionRow(SQLModel, table=True):
    """A sampling session: the `weights` from which a sampling client samples. They never change.

    `status` is active, closed (the session has ended) or dropped (the adapter's files are deleted, see
    `skyrl.storage.db.adapter_versions`). `closed_at` is when the status stopped being active. `size_bytes` is the size
    of the adapter's files. `last_used_at` is the time of the last sample, written about once a minute. Both are None
    for the base model. `clones` counts the copies of the client that have asked for a number."""

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
    status: str
    created_at: float
    clones: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    size_bytes: int | None = Field(default=None, sa_column=Column(BigInteger))
    last_used_at: float | None = None
    closed_at: float | None = None


class FutureRow(SQLModel, table=True):
    """One request and its outcome. `n` numbers the rows in the order of arrival. `status` is pending, done or failed.

    `owner` is the API process that forwards the sample. The request may start at `not_before`, when its tenant's quota
    allows it."""

    __tablename__ = "futures"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("model_id", "seq_id"),
        UniqueConstraint("sampling_session_id", "sample_seq_id"),
        Index("ix_futures_status_n", "status", "n"),
    )
    n: int | None = Field(default=None, sa_column=Column(ROW_NUMBER, primary_key=True, autoincrement=True))
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
    trace: str | None = None
    """The `traceparent` of the request that recorded it; None if it is not traced."""


class PictureRow(SQLModel, table=True):
    """A picture in the requests of a tenant: a PNG or JPEG file with its size in pixels. `digest` is the SHA-256 of the
    file. If `error` says why the file is no picture, `data` is empty. See `skyrl.storage.db.pictures`."""

    __tablename__ = "pictures"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        PrimaryKeyConstraint("tenant", "digest"),
        Index("ix_pictures_last_used_at", "last_used_at", "size_bytes", "tenant"),
    )
    tenant: str
    digest: str
    format: str
    width: int
    height: int
    error: str | None = Field(default=None, sa_column=Column(Text))
    size_bytes: int = Field(sa_column=Column(BigInteger, nullable=False))
    last_used_at: float
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class PictureUseRow(SQLModel, table=True):
    """A request whose body refers to a picture. The picture stays until the request has ended and need not be
    repeated."""

    __tablename__ = "picture_uses"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        PrimaryKeyConstraint("tenant", "digest", "request_id"),
        Index("ix_picture_uses_created_at", "created_at"),
    )
    tenant: str
    digest: str
    request_id: str
    created_at: float


class CheckpointRow(SQLModel, table=True):
    """A named save. `kind` is weights (adapter and optimizer), sampler_weights (one adapter version) or
    external_weights (an adapter for download).

    The files are in the checkpoint store under `store_key`. `weights` are for sampling; None if nobody can sample from
    this checkpoint. If the checkpoint is a copy, `copy_key` is derived from the idempotency key of the request that
    made it."""

    __tablename__ = "checkpoints"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("model_id", "kind", "name"),
        Index("ix_checkpoints_tenant_created_at", "tenant", "created_at", "id", "kind", "expires_at"),
        Index(
            "ix_checkpoints_public",
            "created_at",
            "id",
            "tenant",
            "kind",
            "expires_at",
            "public",
            sqlite_where=text("public IS 1"),
            postgresql_where=text("public IS true"),
        ),
    )
    id: int | None = Field(default=None, primary_key=True)
    tenant: str
    model_id: str
    kind: str
    name: str
    store_key: str = Field(index=True)
    weights: WeightsRef | None = Field(default=None, sa_column=Column(WeightsText, index=True))
    copy_key: str | None = Field(default=None, index=True, unique=True)
    base_model: str
    lora_rank: int
    lora_alpha: float
    seed: int = Field(sa_column=Column(BigInteger, nullable=False))
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    rank_pattern: list[tuple[str, int]] | None = Field(default=None, sa_column=Column(JSON(none_as_null=True)))
    value_head: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=false()))
    size_bytes: int = Field(sa_column=Column(BigInteger, nullable=False))
    public: bool = False
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    created_at: float
    expires_at: float | None = Field(default=None, index=True)


class StoreRow(SQLModel, table=True):
    """A checkpoint store with checkpoints of this database. `owner` is the random text with which it is marked."""

    __tablename__ = "stores"  # pyright: ignore[reportAssignmentType]
    url: str = Field(primary_key=True)
    owner: str


class AdapterUseRow(SQLModel, table=True):
    """An adapter version that OpenAI requests use: its files stay until then (`AdapterUses`)."""

    __tablename__ = "adapter_uses"  # pyright: ignore[reportAssignmentType]
    weights: WeightsRef = Field(sa_column=Column(WeightsText, primary_key=True))
    used_until: float


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
    see `skyrl.storage.db.agents`. Of two turns with the same session, key and attempt the first one stays."""

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


class ApiKeyRow(SQLModel, table=True):
    """An API key from `skyrl keys create`. `digest` is the SHA-256 of the key, `id` the part of the key that is not
    secret. `last_used_at` is rounded down to the minute."""

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


class QuotaRow(SQLModel, table=True):
    """The exceptions of one tenant from the quotas of the configuration. None means no exception; -1 means no quota."""

    __tablename__ = "quotas"  # pyright: ignore[reportAssignmentType]
    tenant: str = Field(primary_key=True)
    requests_in_flight: int | None = None
    tokens_per_minute: int | None = Field(default=None, sa_column=Column(BigInteger))
    models: int | None = None
    stored_bytes: int | None = Field(default=None, sa_column=Column(BigInteger))
    updated_at: float


class AuditEventRow(SQLModel, table=True):
    """An event on a tenant's checkpoints, projects or keys. `event` is `<resource>_<action>`."""

    __tablename__ = "audit_events"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("ix_audit_events_tenant_at", "tenant", "at"),)
    id: int | None = Field(default=None, sa_column=Column(ROW_NUMBER, primary_key=True, autoincrement=True))
    at: float
    tenant: str
    event: str
    details: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class ApiProcessRow(SQLModel, table=True):
    """An API process that serves this database. When its heartbeat stops, other API processes forward its samples."""

    __tablename__ = "api_processes"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    started_at: float
    heartbeat_at: float


class SampleClockRow(SQLModel, table=True):
    """The clock of an API process for the samples of one base model (`skyrl.sampling.gate`). `base_model`
    is a key as in `EngineStateRow`."""

    __tablename__ = "sample_clocks"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (PrimaryKeyConstraint("process_id", "base_model"),)
    process_id: str
    base_model: str
    clock: int = Field(sa_column=Column(BigInteger, nullable=False))


class EngineStateRow(SQLModel, table=True):
    """The row of a base model, by which its engine tells the API where to send samples and whether it can train.
    `base_model` is the row's key, empty for the only base model of a server.

    `state_dir` is the state directory of the server. Gateways give their inference server the paths of adapters in it.
    `activity` is what the engine does, as `skyrl.base.types.activity` encodes it. `layers` are those that adapters can
    train, as `skyrl.base.adapter_files` encodes them."""

    __tablename__ = "engine_state"  # pyright: ignore[reportAssignmentType]
    base_model: str = Field(primary_key=True)
    inference_proxy_url: str | None = None
    generation: int = 0
    training_ready: bool = False
    reason: str = Field(default="", sa_column=Column(Text, nullable=False))
    vocab_size: int | None = None
    max_context: int | None = None
    heartbeat_at: float = 0.0
    updated_at: float = 0.0
    state_dir: str | None = None
    activity: str | None = Field(default=None, sa_column=Column(Text))
    layers: str | None = Field(default=None, sa_column=Column(Text))


class TrainingClaimRow(SQLModel, table=True):
    """The single row with the claim to train on this database. `owner` is the server that has it, and `held_at` is when
    it renewed it."""

    __tablename__ = "training_claim"  # pyright: ignore[reportAssignmentType]
    id: int = Field(default=1, primary_key=True)
    owner: str | None = None
    held_at: float | None = None


class InferenceServerRow(SQLModel, table=True):
    """An inference server that the server `owner` has placed, or wants to place, on a Ray cluster. `url` is None while
    it does not run; then `reason` says why. `node` is the address of the machine, `incarnation` the name of the start
    that runs, `sidecar_url` that of the sidecar beside it, if there is one. See
    `skyrl.storage.db.processes`."""

    __tablename__ = "inference_servers"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (PrimaryKeyConstraint("owner", "name"),)
    owner: str
    name: str
    kind: str
    url: str | None = None
    node: str | None = None
    incarnation: str | None = None
    reason: str = Field(default="", sa_column=Column(Text, nullable=False))
    updated_at: float
    sidecar_url: str | None = None
