"""The tables of what runs have done, which belong to `skyrl.storage.db.tables`: steps, amounts used, and up to when
amounts are counted."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, PrimaryKeyConstraint
from sqlmodel import Field, SQLModel


class RunStepRow(SQLModel, table=True):
    """One step of a model's training: sums over the forward_backward passes since the step before. `ended_at` is when
    the optimizer step ended; None while the step is open. `busy_s` is the trainer's time. The sums of the gap,
    of the ratio and of clipped tokens are weighted by tokens. `wall_s` is the time since the step before ended. See
    `skyrl.storage.db.run_steps`."""

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
    advantage_tokens: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    reward_sum: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    rewards: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    samples: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    truncated: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    surprise_sum: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    surprise_tokens: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    sampling_s: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    sampling_until: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    wait_s: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    save_s: float = Field(default=0.0, sa_column_kwargs={"server_default": "0"})
    saves: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    wall_s: float | None = None


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
