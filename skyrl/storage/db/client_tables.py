"""The tables of what clients bring, two of those of `skyrl.storage.db.tables`: unfinished uploads and custom losses."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, LargeBinary, UniqueConstraint
from sqlmodel import Field, SQLModel


class UploadRow(SQLModel, table=True):
    """An upload of an adapter that is not finished. Its files are in the checkpoint store under keys that follow from
    the id, until `expires_at`. What is trained is as the client has announced it; the files say alpha. `most_bytes`: of
    the adapter's file; they count as stored."""

    __tablename__ = "uploads"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    base_model: str
    lora_rank: int
    lora_alpha: float
    seed: int = Field(sa_column=Column(BigInteger, nullable=False))
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    project_id: str | None = None
    most_bytes: int = Field(sa_column=Column(BigInteger, nullable=False))
    created_at: float
    expires_at: float


class CustomLossRow(SQLModel, table=True):
    """A custom loss of a session (`skyrl.base.types.custom_loss`). `body` is JSON. See
    `skyrl.storage.db.custom_losses`."""

    __tablename__ = "custom_losses"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("session_id", "seq_id"),)
    id: str = Field(primary_key=True)
    session_id: str = Field(foreign_key="sessions.id")
    tenant: str = Field(index=True)
    seq_id: int
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    created_at: float
