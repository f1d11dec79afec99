"""Requests with their outcomes, and the pictures in their bodies."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, LargeBinary, PrimaryKeyConstraint, Text, UniqueConstraint
from sqlmodel import Field, SQLModel

from skyrl.storage.db.columns import ROW_NUMBER


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
        Index("ix_pictures_last_used_at", "last_used_at", "size_bytes"),
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
