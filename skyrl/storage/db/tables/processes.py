"""What the processes of a server tell each other: API processes, engines, and inference servers on a cluster."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, PrimaryKeyConstraint, Text
from sqlmodel import Field, SQLModel


class ApiProcessRow(SQLModel, table=True):
    """An API process that serves this database. When its heartbeat stops, other API processes forward its samples."""

    __tablename__ = "api_processes"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    started_at: float
    heartbeat_at: float


class SampleClockRow(SQLModel, table=True):
    """The clock of an API process for the samples of one base model (`skyrl.server.sampling.fair_order`). `base_model`
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
    `activity` is what the engine does, as `skyrl.base.types.activity` encodes it."""

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
    `skyrl.storage.db.inference_servers`."""

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
