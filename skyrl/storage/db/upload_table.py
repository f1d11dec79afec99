"""The table of unfinished uploads, one of those of `skyrl.storage.db.tables`."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column
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
