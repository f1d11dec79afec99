"""Statements about versions of the full weights: which version is current, and whose turn it is to train.

One model at a time of each base model has full weights. While it lives and has saved weights to sample from, its newest
version is current; else the base model is. Only the current weights can be sampled from. Does not know which weights
the inference servers have; they name their version in each answer. `scope`: the names of the base model that is asked
about.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, Text, cast, exists, select, update

from skyrl.base.types.weights import EVERYTHING, BaseWeights, FullWeights, Scope, WeightsRef
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.storage.db.models import LIVING, models
from skyrl.storage.db.scopes import in_scope
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.tables import FutureRow, SamplingSessionRow

samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]
_futures = FutureRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Holder:
    """The model that has full weights now. `heartbeat_at` is its session's last one, in seconds since the epoch.
    `is_asked`: requests of its session have not ended."""

    model_id: str
    tenant: str
    session_id: str
    session_is_active: bool
    heartbeat_at: float
    is_asked: bool


class WeightsReplaced(NotFound):
    """The weights of a sampling session are not loaded any more."""


def in_training(connection: Connection, scope: Scope = EVERYTHING) -> FullWeights | None:
    """The newest version of the model that lives; of number 0 if it has none yet. None if no such model lives."""
    query = select(models.c.id, models.c.sampler_version).where(
        models.c.status.in_(LIVING), models.c.lora_rank == 0, in_scope(models.c.base_model, scope)
    )
    row = connection.execute(query).first()
    return None if row is None else FullWeights.of(row.id, row.sampler_version)


def current(connection: Connection, scope: Scope = EVERYTHING) -> BaseWeights | FullWeights:
    """The weights that the inference servers have, or get as soon as they can."""
    newest = in_training(connection, scope)
    return BaseWeights() if newest is None or newest.number == 0 else newest


def replaced_sentence(weights: WeightsRef, now: BaseWeights | FullWeights) -> str:
    """Why nobody can sample from `weights` any more. Names no other model: it may be another tenant's."""
    if isinstance(weights, FullWeights):
        if isinstance(now, BaseWeights):
            by = "the base model's weights, because its model has ended"
        else:
            by = f"version {now.name!r}" if now.model_id == weights.model_id else "another model's weights"
        what, remedy = f"version {weights.name!r} was", "make a new sampling client from the newest weights"
    else:
        what, by = "the base model's weights were", "those of the model in training"
        remedy = "the base model's come back when that model has ended"
    return (
        f"these weights are not loaded any more: {what} replaced by {by}. A server for full fine-tuning samples from "
        f"one version at a time; {remedy}"
    )


def holder(connection: Connection, model_id: str, scope: Scope = EVERYTHING) -> Holder | None:
    """The model that has full weights now, if it is another one than `model_id`. One with an adapter, of a start with
    other settings, has none."""
    is_asked = exists().where(_futures.c.session_id == models.c.session_id, _futures.c.status == "pending")
    query = (
        select(models.c.id, models.c.tenant, models.c.session_id, sessions.c.status, sessions.c.heartbeat_at, is_asked)
        .join(sessions, sessions.c.id == models.c.session_id)
        .where(models.c.status.in_(LIVING), models.c.id != model_id, models.c.lora_rank == 0)
        .where(in_scope(models.c.base_model, scope))
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    found, tenant, session, status, heartbeat_at, asked = row
    return Holder(found, tenant, session, status == "active", heartbeat_at, bool(asked))


def check_place(model_id: str, tenant: str, scope: Scope = EVERYTHING) -> Callable[[Connection], None]:
    """The check before a model is added. Raises RequestError while another model of the base model lives."""

    def check(connection: Connection) -> None:
        other = holder(connection, model_id, scope)
        if other is None:
            return
        whose = f"your model {other.model_id!r} is" if other.tenant == tenant else "another tenant's model is"
        raise RequestError(
            f"0 trains a whole model, this server trains one at a time, and {whose} being trained now: it is the next "
            "model's turn when that model is unloaded, or its session ends",
            field="lora_config.rank",
        )

    return check


def drop_replaced(connection: Connection, now: WeightsRef, scope: Scope = EVERYTHING) -> list[str]:
    """Mark open sampling sessions of versions that are not `now` as dropped: their files may go. Returns their ids."""
    replaced = (
        update(samplers)
        .where(
            samplers.c.status == "active",
            cast(samplers.c.weights, Text).startswith("full:", autoescape=True),
            samplers.c.weights != now,
            in_scope(samplers.c.base_model, scope),
        )
        .values(status="dropped", closed_at=time.time())
        .returning(samplers.c.id)
    )
    return list(connection.execute(replaced).scalars())
