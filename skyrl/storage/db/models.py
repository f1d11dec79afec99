"""Models in training, and their commands: statements on the table of models, with a cache of its rows in an API
process, and those on the futures table by which the engine reads its commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, func, insert, or_, select, update

from skyrl.base.types.requests import ENGINE_KINDS, Command, ExecutedCommand, Kind
from skyrl.base.types.weights import EVERYTHING, LoraSpec, Scope
from skyrl.base.wire.errors import ErrorCategory, NotFound
from skyrl.storage.db.columns import lora_of, lora_values, record_of
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import RECORD, futures
from skyrl.storage.db.row_caches import SessionCache
from skyrl.storage.db.row_statements import RowStatement
from skyrl.storage.db.scopes import in_scope, model_in_scope
from skyrl.storage.db.sessions import in_project, sessions
from skyrl.storage.db.tables import ModelRow, SamplingSessionRow
from skyrl.storage.db.writer import GroupCommitWriter

models = ModelRow.__table__  # type: ignore[attr-defined]
NEWEST_FIRST = models.c.created_at.desc(), models.c.id.desc()
samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]

_HEADER = (
    futures.c.n,
    futures.c.id,
    futures.c.kind,
    futures.c.tenant,
    futures.c.session_id,
    futures.c.model_id,
    futures.c.seq_id,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.body_format,
    func.length(futures.c.body).label("size"),
    futures.c.not_before,
    futures.c.created_at,
    futures.c.trace,
)


_PENDING = (
    select(*_HEADER)
    .where(
        futures.c.status == "pending",
        futures.c.n > bindparam("after"),
        futures.c.kind.in_(bindparam("kinds", expanding=True)),
    )
    .order_by(futures.c.n)
)


@cache  # to build a statement takes longer than to run it
def _pending_in(scope: Scope) -> Select[*tuple[Any, ...]]:
    return _PENDING.where(model_in_scope(futures.c.model_id, scope))


def _command(row: Any) -> Command:
    return Command(
        row.n,
        row.id,
        Kind(row.kind),
        row.tenant,
        row.session_id,
        row.model_id,
        row.seq_id,
        row.sampling_session_id,
        row.sample_seq_id,
        row.body_format,
        row.size or 0,
        row.not_before,
        row.created_at,
        row.trace,
    )


def pending(connection: Connection, kinds: Sequence[str], after: int = 0, scope: Scope = EVERYTHING) -> list[Command]:
    """Pending requests of these kinds that arrived after row number `after`, in order of arrival, without bodies. Those
    of models that are not in the scope are left out.

    `after` must be 0 or the number of a row that is still stored: if the last row is deleted, SQLite gives its number
    to the next row.
    """
    return [_command(row) for row in connection.execute(_pending_in(scope), {"kinds": kinds, "after": after})]


def models_with_pending(connection: Connection) -> set[str]:
    """Ids of the models that have commands without an outcome."""
    query = select(futures.c.model_id).where(
        futures.c.status == "pending", futures.c.kind.in_(ENGINE_KINDS), futures.c.model_id.is_not(None)
    )
    return set(connection.execute(query.distinct()).scalars())


@dataclass(frozen=True, slots=True)
class PendingCommand:
    """A command that has no outcome yet. `before` are the kinds of its model's pending commands with lower numbers."""

    kind: Kind
    tenant: str
    model_id: str
    seq_id: int | None
    before: list[Kind]


def pending_command(connection: Connection, request_id: str) -> PendingCommand | None:
    """None if the request is no command of a model, or has ended."""
    header = (futures.c.kind, futures.c.tenant, futures.c.model_id, futures.c.seq_id, futures.c.n)
    row = connection.execute(select(*header).where(futures.c.id == request_id, futures.c.status == "pending")).first()
    if row is None or row.model_id is None:
        return None
    earlier = futures.c.n < row.n if row.seq_id is None else futures.c.seq_id < row.seq_id
    query = select(futures.c.kind).where(futures.c.model_id == row.model_id, futures.c.status == "pending", earlier)
    before = [Kind(kind) for kind in connection.execute(query).scalars()]
    return PendingCommand(Kind(row.kind), row.tenant, row.model_id, row.seq_id, before)


def executed(connection: Connection, model_id: str, first_seq: int) -> list[ExecutedCommand]:
    """A model's commands from number `first_seq` on that have changed the model, in their order. Recovery repeats them.

    These are the commands that succeeded, and the optimizer steps that failed because of their caller's mistake: when
    the gradient is not finite, the step drops it. A failure of the server leaves the model unchanged.
    """
    query = (
        select(*_HEADER, futures.c.status, futures.c.completed_at)
        .where(_executed(model_id, first_seq))
        .order_by(futures.c.seq_id)
    )
    return [ExecutedCommand(_command(row), row.status, row.completed_at) for row in connection.execute(query)]


def count_executed(connection: Connection, model_id: str, first_seq: int) -> int:
    """The number of commands that `executed` returns."""
    query = select(func.count()).select_from(futures).where(_executed(model_id, first_seq))
    return connection.execute(query).scalar_one()


def loads_to_repeat(connection: Connection) -> list[bytes]:
    """The bodies of the loads that no snapshot of their living models holds: recovery would repeat them. Asks for the
    kind first, because SQLite reads the whole body of a row to get its status."""
    loads = (futures.c.kind == Kind.LOAD_WEIGHTS) & _executed(models.c.id, models.c.next_seq)
    query = select(futures.c.body).join(models, models.c.id == futures.c.model_id)
    return list(connection.execute(query.where(models.c.status.in_(LIVING), loads)).scalars())


def _executed(model_id: str | ColumnElement[str], first_seq: int | ColumnElement[int]) -> ColumnElement[bool]:
    dropped_gradient = and_(
        futures.c.status == "failed",
        futures.c.kind == Kind.OPTIM_STEP,
        futures.c.error_category == ErrorCategory.USER,
    )
    changed = or_(futures.c.status == "done", dropped_gradient)
    return and_(futures.c.model_id == model_id, futures.c.seq_id >= first_seq, changed)


def highest_settled_seq(connection: Connection, model_id: str) -> int:
    """The highest seq_id of a model that has an outcome; -1 if there is none."""
    row = connection.execute(
        select(func.max(futures.c.seq_id)).where(futures.c.model_id == model_id, futures.c.status != "pending")
    ).first()
    return -1 if row is None or row[0] is None else int(row[0])


_BODIES = select(futures.c.id, futures.c.body).where(futures.c.id.in_(bindparam("ids", expanding=True)))
_PENDING_BODIES = _BODIES.where(futures.c.status == "pending")


def bodies(connection: Connection, request_ids: Sequence[str], *, pending: bool = False) -> dict[str, bytes]:
    """Bodies by request id. Leaves out requests that are not stored, and with `pending` also those that have ended."""
    query = _PENDING_BODIES if pending else _BODIES
    return {row.id: row.body for row in connection.execute(query, {"ids": request_ids})}


def highest_seq(connection: Connection, model_id: str) -> int:
    """The highest seq_id that is recorded for a model; -1 if there is none."""
    row = connection.execute(select(func.max(futures.c.seq_id)).where(futures.c.model_id == model_id)).first()
    return -1 if row is None or row[0] is None else int(row[0])


def base_model_of(connection: Connection, request_id: str) -> str | None:
    """The name of the base model that a request is about; None if there is no such request, or it is about none."""
    query = (
        select(func.coalesce(models.c.base_model, samplers.c.base_model))
        .select_from(futures)
        .outerjoin(models, models.c.id == futures.c.model_id)
        .outerjoin(samplers, samplers.c.id == futures.c.sampling_session_id)
        .where(futures.c.id == request_id)
    )
    return connection.execute(query).scalar()


_TOUCH = RowStatement(
    ("model", "now"),
    sqlite="UPDATE models SET last_request_at = now FROM given WHERE models.id = model",
    postgres="UPDATE models SET last_request_at = %(now)s WHERE id = %(model)s",
    first_of="model",
)

TOUCH_S = 5.0
"""The time of a model's last request is written at most this often: each time two indexes get an entry."""
LIVING = ("creating", "ready")
"""Statuses of models that are being trained."""


@dataclass(frozen=True, slots=True)
class Model:
    """The values that a client chose when it created a model. They never change."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    lora: LoraSpec
    user_metadata: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ModelRecord(Model):
    """A model's row as it is now. Times are in seconds since the epoch; the other fields are explained in
    `skyrl.storage.db.tables`."""

    status: str
    sampler_version: int
    versions_taken: int
    next_seq: int
    created_at: float
    last_request_at: float

    @property
    def is_living(self) -> bool:
        return self.status in LIVING


def _record(row: Any) -> ModelRecord:
    return record_of(ModelRecord, row, lora=lora_of(row))


def model_values(model: Model, model_seq_id: int, status: str, sampler_version: int = 0) -> dict[str, Any]:
    """The row of a new model."""
    now = time.time()
    return {
        "id": model.id,
        "session_id": model.session_id,
        "tenant": model.tenant,
        "model_seq_id": model_seq_id,
        "base_model": model.base_model,
        "status": status,
        **lora_values(model.lora),
        "user_metadata": model.user_metadata,
        "sampler_version": sampler_version,
        "next_seq": 0,
        "created_at": now,
        "last_request_at": now,
    }


def add_model(
    model: Model, model_seq_id: int, check: Callable[[Connection], None] | None = None
) -> Callable[[Connection], None]:
    """A change that adds a model's row, for the transaction that records the command which makes the model. It adds
    nothing if the row exists, because then the request is a repeat. It raises what `check` raises for a new model.

    Early versions stored the row before the command. A crash in between left a row without a command. Such a row gets
    the values of the new request."""
    values = model_values(model, model_seq_id, "creating")

    def add(connection: Connection) -> None:
        same_id = models.c.id == model.id
        existing = connection.execute(select(models.c.status).where(same_id)).first()
        if existing is None:
            if check is not None:
                check(connection)
            connection.execute(insert(models), values)
        elif existing.status == "creating" and highest_seq(connection, model.id) < 0:
            connection.execute(update(models).where(same_id).values(values))

    return add


class Models:
    """Finds models, and stores when each had its last request."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._known: SessionCache[Model] = SessionCache()
        self._touched: dict[str, float] = {}
        """By model: the time that was written in the last TOUCH_S seconds, the oldest first."""

    async def find(self, model_id: str, tenant: str) -> Model | None:
        """The tenant's model, whatever its status."""
        model = self._known.get(model_id)
        if model is None:
            model = await self._database.read_async(lambda c: find_model(c, model_id))
            if model is None:
                return None
            if model.is_living:  # `forget_session` would never remove a closed model
                self._known.keep(model)
        return model if model.tenant == tenant else None

    async def named(self, model_id: str, tenant: str) -> Model:
        """As `find`. Raises NotFound."""
        if (model := await self.find(model_id, tenant)) is None:
            raise NotFound(f"no model {model_id!r}", field="model_id")
        return model

    async def touch(self, model_id: str) -> None:
        """Store the time of the last request, at most once in TOUCH_S."""
        now = time.time()
        touched = self._touched
        while touched and now - touched[oldest := next(iter(touched))] >= TOUCH_S:
            del touched[oldest]
        if model_id not in touched:
            touched[model_id] = now
            await self._writer.execute(_TOUCH, {"model": model_id, "now": now})

    def forget_session(self, session_id: str) -> None:
        self._known.drop_session(session_id)

    async def page(
        self, tenant: str, limit: int, offset: int, project_id: str | None = None
    ) -> tuple[list[ModelRecord], int]:
        """One page of a tenant's models, newest first, and the number of all its models. With `project_id`, only models
        of that project's sessions."""
        wanted: ColumnElement[bool] = models.c.tenant == tenant
        if project_id is not None:
            of_project = select(sessions.c.id).where(sessions.c.tenant == tenant, in_project(project_id))
            wanted &= models.c.session_id.in_(of_project)
        query = select(models).where(wanted).order_by(*NEWEST_FIRST).limit(limit).offset(offset)
        count = select(func.count()).select_from(models).where(wanted)
        return await self._database.read_async(
            lambda c: ([_record(row) for row in c.execute(query)], c.execute(count).scalar_one())
        )

    async def record(self, model_id: str, tenant: str | None) -> ModelRecord | None:
        """The current row of the tenant's model, whatever its status. With `tenant` None, of any tenant's model."""
        model = await self._database.read_async(lambda c: find_model(c, model_id))
        return model if model is not None and tenant in (None, model.tenant) else None


def find_model(connection: Connection, model_id: str) -> ModelRecord | None:
    row = connection.execute(select(models).where(models.c.id == model_id)).first()
    return None if row is None else _record(row)


def record_numbered(connection: Connection, parameters: dict[str, Any]) -> None:
    """Add the row of a model's command that came without a number. It gets the number after the model's highest number.

    Rows of commands that are in a snapshot may be deleted, but their numbers still count. Write transactions of all
    processes run one at a time, so no other command gets the same number."""
    model_id = parameters["model_id"]
    in_snapshot = connection.execute(select(models.c.next_seq).where(models.c.id == model_id)).scalar() or 0
    number = max(highest_seq(connection, model_id) + 1, in_snapshot)
    RECORD.execute(connection, [parameters | {"seq_id": number}])


def living(connection: Connection, scope: Scope = EVERYTHING) -> list[ModelRecord]:
    """Models that are being trained, oldest first."""
    query = select(models).where(models.c.status.in_(LIVING), in_scope(models.c.base_model, scope))
    query = query.order_by(models.c.created_at)
    return [_record(row) for row in connection.execute(query)]


def heartbeats(connection: Connection, scope: Scope = EVERYTHING) -> dict[str, float]:
    """For each model that is being trained, the last heartbeat of its session, in seconds since the epoch."""
    query = select(models.c.id, sessions.c.heartbeat_at).join(sessions, sessions.c.id == models.c.session_id)
    query = query.where(models.c.status.in_(LIVING), in_scope(models.c.base_model, scope))
    return {row.id: row.heartbeat_at for row in connection.execute(query)}


def living_among(connection: Connection, model_ids: Collection[str]) -> set[str]:
    """The ids among `model_ids` of models that are being trained."""
    query = select(models.c.id).where(models.c.id.in_(model_ids), models.c.status.in_(LIVING))
    return set(connection.execute(query).scalars()) if model_ids else set()


def over_among(connection: Connection, model_ids: Collection[str]) -> set[str]:
    """The ids among `model_ids` of models that are closed, or that have failed and whose session has ended."""
    active = select(sessions.c.id).where(sessions.c.id == models.c.session_id, sessions.c.status == "active")
    over = or_(models.c.status == "closed", and_(models.c.status == "failed", ~active.exists()))
    query = select(models.c.id).where(models.c.id.in_(model_ids), over)
    return set(connection.execute(query).scalars()) if model_ids else set()


def set_model(model_id: str, **values: int) -> Callable[[Connection], None]:
    """A change that updates counters of one model."""

    def change(connection: Connection) -> None:
        connection.execute(update(models).where(models.c.id == model_id).values(**values))

    return change


def set_status(model_id: str, status: str) -> Callable[[Connection], None]:
    """A change of a model's status. One that has ended stays as it is: its session may end while a command runs."""

    def change(connection: Connection) -> None:
        lives = (models.c.id == model_id) & models.c.status.in_(LIVING)
        connection.execute(update(models).where(lives).values(status=status))

    return change
