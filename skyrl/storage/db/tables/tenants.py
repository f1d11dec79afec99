"""Tenants: their API keys and quotas, what they have used, and the log of events."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Index, LargeBinary, PrimaryKeyConstraint
from sqlmodel import Field, SQLModel

from skyrl.storage.db.columns import ROW_NUMBER


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


class UsageRow(SQLModel, table=True):
    """How much of one kind a run used in one hour of UTC: tokens, checkpoints, or gigabyte-hours of storage.

    `bucket` is the start of the hour. `session_id` is empty for storage, because checkpoints outlive sessions, and for
    requests without a session. `model_id` is the run: the model that was trained, or whose adapter was sampled from. It
    is empty for the base model, for storage, and for what versions before revision 0009 have counted."""

    __tablename__ = "usage"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        PrimaryKeyConstraint("tenant", "bucket", "session_id", "model_id", "base_model", "kind"),
        Index("ix_usage_bucket", "bucket"),
    )
    bucket: int = Field(sa_column=Column(BigInteger, nullable=False))
    tenant: str
    session_id: str
    model_id: str
    base_model: str
    kind: str
    amount: float


class MeterRow(SQLModel, table=True):
    """Up to which time the table `usage` contains the storage, and the samples that each process has counted."""

    __tablename__ = "meters"  # pyright: ignore[reportAssignmentType]
    name: str = Field(primary_key=True)
    counted_until: float


class AuditEventRow(SQLModel, table=True):
    """An event on a tenant's checkpoints, projects or keys. `event` is `<resource>_<action>`."""

    __tablename__ = "audit_events"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("ix_audit_events_tenant_at", "tenant", "at"),)
    id: int | None = Field(default=None, sa_column=Column(ROW_NUMBER, primary_key=True, autoincrement=True))
    at: float
    tenant: str
    event: str
    details: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
