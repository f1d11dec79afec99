"""Models (adapters in training): their rows, and what the API needs to know of one without asking the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from skyrl.db.database import Database
from skyrl.db.futures import RECORD, highest_seq
from skyrl.db.sessions import in_project, sessions
from skyrl.db.tables import ModelRow
from skyrl.db.writer import GroupCommitWriter

models = ModelRow.__table__  # type: ignore[attr-defined]

_TOUCH = update(models).where(models.c.id == bindparam("model")).values(last_request_at=bindparam("now"))

TOUCH_S = 1.0
"""The time of a model's last request is written at most so often."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter's shape: what create_model asked for, and what a checkpoint was saved with."""

    lora_rank: int
    lora_alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the API process knows it; these values never change."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    adapter: Adapter
    user_metadata: dict[str, Any] | None


def adapter_of(row: Any) -> Adapter:
    """The adapter columns of a models or checkpoints row."""
    return Adapter(row.lora_rank, row.lora_alpha, row.seed, row.train_attn, row.train_mlp, row.train_unembed)


def _model(row: Any) -> Model:
    return Model(row.id, row.session_id, row.tenant, row.base_model, adapter_of(row), row.user_metadata)


def add_model(
    model: Model, model_seq_id: int, check: Callable[[Connection], None] | None = None
) -> Callable[[Connection], None]:
    """A change that adds a model's row, for the transaction that records the command which makes the model. Nothing is
    added when the row is there: the request is repeated. Raises what `check` raises of a new model.

    Versions before this one stored the row first and the command after it. A crash in between left a row without a
    command; such a row gets the values of the request that comes now."""
    now = time.time()
    values = {
        "id": model.id,
        "session_id": model.session_id,
        "tenant": model.tenant,
        "model_seq_id": model_seq_id,
        "base_model": model.base_model,
        "status": "creating",
        **asdict(model.adapter),
        "user_metadata": model.user_metadata,
        "sampler_version": 0,
        "next_seq": 0,
        "created_at": now,
        "last_request_at": now,
    }

    def add(connection: Connection) -> None:
        mine = models.c.id == model.id
        known = connection.execute(select(models.c.status).where(mine)).first()
        if known is None:
            if check is not None:
                check(connection)
            connection.execute(insert(models), values)
        elif known.status == "creating" and highest_seq(connection, model.id) < 0:
            connection.execute(update(models).where(mine).values(values))

    return add


class Models:
    """Find models, and note when each had its last request."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._known: dict[str, Model] = {}
        self._touched: dict[str, float] = {}
        """Models that had a request in the last second, closed ones too, with its time; the oldest first."""

    async def find(self, model_id: str, tenant: str) -> Model | None:
        """The tenant's model, whatever its status."""
        model = self._known.get(model_id)
        if model is None:
            row = await self._database.read_async(
                lambda c: c.execute(select(models).where(models.c.id == model_id)).first()
            )
            if row is None:
                return None
            model = _model(row)
            if row.status in ("creating", "ready"):  # one that is closed is not forgotten again
                self._known[model_id] = model
        return model if model.tenant == tenant else None

    async def touch(self, model_id: str) -> None:
        """Remember, once a second at most, the time of the last request."""
        now = time.time()
        touched = self._touched
        while touched and now - touched[oldest := next(iter(touched))] >= TOUCH_S:  # oldest first, as they were added
            del touched[oldest]
        if model_id not in touched:
            touched[model_id] = now
            await self._writer.execute(_TOUCH, {"model": model_id, "now": now})

    def forget_session(self, session_id: str) -> None:
        for model_id in [model.id for model in self._known.values() if model.session_id == session_id]:
            self._known.pop(model_id, None)

    async def page(self, tenant: str, limit: int, offset: int, project_id: str | None = None) -> tuple[list[Any], int]:
        """Rows of a tenant's models, newest first, and how many there are: all, or those of a project's sessions."""
        mine = models.c.tenant == tenant
        if project_id is not None:
            mine &= models.c.session_id.in_(select(sessions.c.id).where(in_project(project_id)))
        query = select(models).where(mine).order_by(models.c.created_at.desc())
        count = select(func.count()).select_from(models).where(mine)
        return await self._database.read_async(
            lambda c: (list(c.execute(query.limit(limit).offset(offset))), c.execute(count).scalar_one())
        )

    async def row(self, model_id: str, tenant: str | None) -> Any | None:
        """The tenant's model, whatever its status; anybody's for None."""
        query = select(models).where(models.c.id == model_id)
        if tenant is not None:
            query = query.where(models.c.tenant == tenant)
        return await self._database.read_async(lambda c: c.execute(query).first())


def record_numbered(connection: Connection, parameters: dict[str, Any]) -> None:
    """Add the row of a model's command that came without a number: it gets the one after all that there are. Commands
    that are in a snapshot may have been forgotten, but still count. Writes come one by one, whichever process it came
    to."""
    model_id = parameters["model_id"]
    in_snapshot = connection.execute(select(models.c.next_seq).where(models.c.id == model_id)).scalar() or 0
    number = max(highest_seq(connection, model_id) + 1, in_snapshot)
    connection.execute(RECORD.statement, parameters | {"seq_id": number})


def living(connection: Connection) -> list[Any]:
    """Rows of models that are being trained, oldest first."""
    return list(
        connection.execute(
            select(models).where(models.c.status.in_(("creating", "ready"))).order_by(models.c.created_at)
        )
    )


def living_among(connection: Connection, model_ids: Collection[str]) -> set[str]:
    """Those of `model_ids` that are being trained."""
    query = select(models.c.id).where(models.c.id.in_(model_ids), models.c.status.in_(("creating", "ready")))
    return {row.id for row in connection.execute(query)} if model_ids else set()


def set_model(model_id: str, **values: Any) -> Callable[[Connection], None]:
    """A change that updates columns of one model."""
    return lambda connection: (
        connection.execute(update(models).where(models.c.id == model_id).values(**values)) and None
    )
