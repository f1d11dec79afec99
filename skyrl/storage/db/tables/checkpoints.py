"""Named saves, the stores that hold their files, and the adapter versions that requests use."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Column, UniqueConstraint
from sqlmodel import Field, SQLModel

from skyrl.base.types.weights import WeightsRef
from skyrl.storage.db.columns import WeightsText


class CheckpointRow(SQLModel, table=True):
    """A named save. `kind` is weights (adapter and optimizer), sampler_weights (one adapter version) or
    external_weights (an adapter for download).

    The files are in the checkpoint store under `store_key`. It is None for sampler weights from a version without a
    checkpoint store, until the engine stores them there. `weights` are for sampling; None if nobody can sample from
    this checkpoint. `old_directory` is as in `SamplingSessionRow`. If the checkpoint is a copy, `copy_key` is derived
    from the idempotency key of the request that made it."""

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
    """A checkpoint store with checkpoints of this database. `owner` is the random text with which it is marked."""

    __tablename__ = "stores"  # pyright: ignore[reportAssignmentType]
    url: str = Field(primary_key=True)
    owner: str


class AdapterUseRow(SQLModel, table=True):
    """An adapter version that OpenAI requests use: its files stay until then (`AdapterUses`)."""

    __tablename__ = "adapter_uses"  # pyright: ignore[reportAssignmentType]
    weights: WeightsRef = Field(sa_column=Column(WeightsText, primary_key=True))
    used_until: float
