"""Statements on the futures table by which the engine reads its commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, func, or_, select

from skyrl.base.types.requests import ENGINE_KINDS, Command, ExecutedCommand, Kind
from skyrl.base.types.weights import EVERYTHING, Scope
from skyrl.base.wire.errors import ErrorCategory
from skyrl.storage.db.futures import futures
from skyrl.storage.db.scopes import model_in_scope
from skyrl.storage.db.tables import ModelRow, SamplingSessionRow

models = ModelRow.__table__  # type: ignore[attr-defined]
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


def _executed(model_id: str, first_seq: int) -> ColumnElement[bool]:
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
