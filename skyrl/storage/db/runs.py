"""A tenant's runs and samplers as the status page shows them: the rows, and counts of what is pending now.

A run is a model: one adapter in training, or one that was trained. Reads only; each function takes a tenant, and finds
nothing of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, String, func, null, select, type_coerce

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import BaseWeights, WeightsRef
from skyrl.storage.db.adapter_versions import OPEN
from skyrl.storage.db.columns import record_of
from skyrl.storage.db.models import LIVING, models
from skyrl.storage.db.run_steps import Step, last_steps
from skyrl.storage.db.samplers import samplers
from skyrl.storage.db.sessions import active_sessions_of, sessions
from skyrl.storage.db.tables import FutureRow

_futures = FutureRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Run:
    """A model and its session. Times are in seconds since the epoch. `last` is the last step that has ended."""

    id: str
    session_id: str
    name: str | None
    base_model: str
    lora_rank: int
    status: str
    steps: int
    created_at: float
    last_request_at: float
    session_status: str
    heartbeat_at: float
    last: Step | None
    samples_in_flight: int

    @property
    def is_living(self) -> bool:
        return self.status in LIVING and self.session_status == "active"


@dataclass(frozen=True, slots=True)
class OpenSampler:
    """A sampling session of an active session. `model_path` is None for the base model and for an unnamed save.
    `weights` is the name of the adapter version that it samples from; None for the base model."""

    id: str
    session_id: str
    base_model: str
    model_path: str | None
    weights: str | None
    created_at: float
    last_used_at: float | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class SamplerGroup:
    """The open sampling sessions of one model, or of a base model (`run` None). `open` counts them; `newest` are the
    first NEWEST, the newest first. `in_flight` and `last_used_at` are of all of them."""

    run: str | None
    base_model: str
    open: int
    in_flight: int
    newest_at: float
    last_used_at: float | None
    newest: list[OpenSampler]


@dataclass(frozen=True, slots=True)
class Pending:
    """Requests of one kind that have not ended. `model_id` is None for samples. The oldest was accepted at `since`
    (seconds since the epoch). `base_model` is that of samples, where it was asked for."""

    kind: Kind
    model_id: str | None
    number: int
    since: float
    base_model: str | None = None


DOWNLOAD = "tinker checkpoint download"
"""The SDK's command line loads a checkpoint into a model with this `created_by`, and exports it. That is no run."""
NEWEST = 10
"""The most samplers of a group that are listed."""
_MODEL = func.rtrim(type_coerce(samplers.c.weights, String), "0123456789")
"""The weights' text without the version's number."""

_RUN = (
    select(
        models,
        sessions.c.display_name,
        sessions.c.status.label("session_status"),
        sessions.c.heartbeat_at,
    )
    .join(sessions, sessions.c.id == models.c.session_id)
    .order_by(models.c.last_request_at.desc(), models.c.id.desc())
)


def runs_of(connection: Connection, tenant: str, limit: int) -> list[Run]:
    """The tenant's runs with the newest requests, without models that a download makes."""
    is_run = func.coalesce(models.c.user_metadata["created_by"].as_string(), "") != DOWNLOAD
    query = _RUN.where(models.c.tenant == tenant, is_run).limit(limit)
    return _runs(connection, connection.execute(query).all(), tenant)


def names_of(connection: Connection, tenant: str, ids: Collection[str]) -> dict[str, str]:
    """By id, the names of those of these models of the tenant that have one."""
    query = (
        select(models.c.id, models.c.user_metadata, sessions.c.display_name)
        .join(sessions, sessions.c.id == models.c.session_id)
        .where(models.c.tenant == tenant, models.c.id.in_(ids))
    )
    found = {row.id: _name(row) for row in connection.execute(query)} if ids else {}
    return {model: name for model, name in found.items() if name}


def run_of(connection: Connection, model_id: str, tenant: str) -> Run | None:
    """The tenant's run; None for an unknown one and for another tenant's."""
    rows = connection.execute(_RUN.where(models.c.id == model_id, models.c.tenant == tenant)).all()
    return next(iter(_runs(connection, rows, tenant)), None)


def _runs(connection: Connection, rows: Sequence[Any], tenant: str) -> list[Run]:
    last = last_steps(connection, [row.id for row in rows])
    in_flight = _samples_by_model(connection, tenant)
    return [
        record_of(Run, row, name=_name(row), last=last.get(row.id), samples_in_flight=in_flight.get(row.id, 0))
        for row in rows
    ]


def _name(row: Any) -> str | None:
    """The name that the user gave the run: in the model's metadata, or as the session's display name."""
    name = (row.user_metadata or {}).get("name")
    return name if isinstance(name, str) and name else row.display_name


def open_samplers(connection: Connection, tenant: str, limit: int) -> list[SamplerGroup]:
    """The tenant's open sampling sessions by the weights' model, with the newest group first: at most `limit` groups.
    The query starts from the tenant's active sessions, so it does not read other tenants' rows."""
    group = (_MODEL, samplers.c.base_model)
    newest = (samplers.c.created_at.desc(), samplers.c.id)
    places = (
        select(
            samplers,
            func.row_number().over(partition_by=group, order_by=newest).label("place"),
            func.count().over(partition_by=group).label("open"),
            func.max(samplers.c.created_at).over(partition_by=group).label("newest_at"),
            func.max(samplers.c.last_used_at).over(partition_by=group).label("group_used_at"),
        )
        .join(sessions, sessions.c.id == samplers.c.session_id)
        .where(active_sessions_of(tenant), samplers.c.tenant == tenant, OPEN)
        .subquery()
    )
    query = (
        select(places)
        .where(places.c.place <= NEWEST)
        .order_by(places.c.newest_at.desc(), places.c.base_model, places.c.weights, places.c.place)
        .limit(limit * NEWEST)
    )
    in_flight = _samples(connection, tenant)
    by_weights = _samples_by_weights(connection, in_flight)
    groups: dict[tuple[str | None, str], SamplerGroup] = {}
    for row in sorted(connection.execute(query), key=lambda row: row.place):
        key = (_model_of(row.weights), row.base_model)
        weights = None if isinstance(row.weights, BaseWeights) else row.weights.name
        sampler = record_of(OpenSampler, row, weights=weights, in_flight=in_flight.get(row.id, 0))
        if key not in groups:
            groups[key] = SamplerGroup(*key, row.open, by_weights.get(key, 0), row.newest_at, row.group_used_at, [])
        groups[key].newest.append(sampler)
    return sorted(groups.values(), key=lambda group: -group.newest_at)[:limit]


def _samples(connection: Connection, tenant: str) -> dict[str, int]:
    query = (
        select(_futures.c.sampling_session_id, func.count())
        .where(_pending(tenant), _futures.c.sampling_session_id.is_not(None))
        .group_by(_futures.c.sampling_session_id)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def _samples_by_weights(connection: Connection, by_sampler: Mapping[str, int]) -> dict[tuple[str | None, str], int]:
    """Samples in flight by the model whose weights they come from and base model; None for the base model itself."""
    counts: dict[tuple[str | None, str], int] = {}
    query = select(samplers.c.id, samplers.c.weights, samplers.c.base_model).where(samplers.c.id.in_([*by_sampler]))
    for row in connection.execute(query) if by_sampler else ():
        key = (_model_of(row.weights), row.base_model)
        counts[key] = counts.get(key, 0) + by_sampler[row.id]
    return counts


def _samples_by_model(connection: Connection, tenant: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (model, _), number in _samples_by_weights(connection, _samples(connection, tenant)).items():
        if model is not None:
            counts[model] = counts.get(model, 0) + number
    return counts


def _model_of(weights: WeightsRef) -> str | None:
    return None if isinstance(weights, BaseWeights) else weights.model_id


def pending_of(connection: Connection, tenant: str, limit: int, *, by_base_model: bool = False) -> list[Pending]:
    """The tenant's requests that have not ended, by kind and model, and samples `by_base_model` if that is asked for:
    the `limit` groups with the oldest requests."""
    since = func.min(_futures.c.created_at).label("since")
    base_model = samplers.c.base_model if by_base_model else null().label("base_model")
    of_sampler = samplers.c.id == _futures.c.sampling_session_id
    group = (_futures.c.kind, _futures.c.model_id, *((base_model,) if by_base_model else ()))
    query = (
        select(_futures.c.kind, _futures.c.model_id, func.count().label("number"), since, base_model)
        .select_from(_futures.outerjoin(samplers, of_sampler) if by_base_model else _futures)
        .where(_pending(tenant))
        .group_by(*group)
        .order_by(since)
        .limit(limit)
    )
    return [
        Pending(Kind(row.kind), row.model_id, row.number, row.since, row.base_model)
        for row in connection.execute(query)
    ]


def _pending(tenant: str) -> Any:
    return (_futures.c.status == "pending") & (_futures.c.tenant == tenant)


def pending_by_kind(connection: Connection) -> dict[str, int]:
    """The pending requests of all tenants, by kind."""
    query = select(_futures.c.kind, func.count()).where(_futures.c.status == "pending").group_by(_futures.c.kind)
    return {str(Kind(row[0])): row[1] for row in connection.execute(query)}
