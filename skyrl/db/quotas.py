"""Statements about quotas: tenants' exceptions from the configuration's, and what tenants hold of what is counted here.

Knows columns, not what the configuration says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, func, insert, literal_column, or_, select, update

from skyrl.db.adapter_versions import unsaved_bytes
from skyrl.db.checkpoints import checkpoints
from skyrl.db.models import models
from skyrl.db.samplers import samplers
from skyrl.db.sessions import sessions
from skyrl.db.tables import FutureRow, QuotaRow
from skyrl.types.kinds import SAMPLES
from skyrl.wire.paths import TinkerPath

quotas = QuotaRow.__table__  # type: ignore[attr-defined]
futures = FutureRow.__table__  # type: ignore[attr-defined]

_NUMBERS = (quotas.c.requests_in_flight, quotas.c.tokens_per_minute, quotas.c.models, quotas.c.stored_bytes)
"""In the order of `Limits`."""

Exceptions = tuple[int | None, ...]
"""One tenant's numbers, in the order of `Limits`. None: as the configuration says; -1: no quota."""


def exceptions(connection: Connection) -> dict[str, Exceptions]:
    """All tenants that have some."""
    return {row[0]: tuple(row[1:]) for row in connection.execute(select(quotas.c.tenant, *_NUMBERS))}


def exceptions_of(connection: Connection, tenant: str) -> Exceptions:
    row = connection.execute(select(*_NUMBERS).where(quotas.c.tenant == tenant)).first()
    return (None,) * len(_NUMBERS) if row is None else tuple(row)


def change(connection: Connection, tenant: str, values: Mapping[str, int | None]) -> None:
    """Set some of a tenant's exceptions, and keep its others."""
    mine = quotas.c.tenant == tenant
    changed = {**values, "updated_at": time.time()}
    if connection.execute(update(quotas).where(mine).values(changed)).rowcount == 0:
        connection.execute(insert(quotas), {"tenant": tenant} | changed)


def clear(connection: Connection, tenant: str) -> bool:
    """Whether it had exceptions."""
    return connection.execute(delete(quotas).where(quotas.c.tenant == tenant)).rowcount > 0


def _active_sessions(tenant: str) -> Any:
    """A condition that the index of active sessions answers: SQLite uses it only where the status is no parameter."""
    return (sessions.c.tenant == tenant) & (sessions.c.status == literal_column("'active'"))


def active_sessions(connection: Connection, tenant: str) -> int:
    return connection.execute(select(func.count()).select_from(sessions).where(_active_sessions(tenant))).scalar_one()


def living_models(connection: Connection, tenant: str) -> int:
    """Models in training in a tenant's active sessions."""
    active = select(sessions.c.id).where(_active_sessions(tenant))
    living = models.c.session_id.in_(active) & models.c.status.in_(("creating", "ready"))
    return connection.execute(select(func.count()).select_from(models).where(living)).scalar_one()


def living_samplers(connection: Connection, tenant: str) -> int:
    """Sampling sessions in a tenant's active sessions."""
    active = select(sessions.c.id).where(_active_sessions(tenant))
    query = select(func.count()).select_from(samplers).where(samplers.c.session_id.in_(active))
    return connection.execute(query).scalar_one()


def _live(now: float) -> Any:
    return or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now)


def stored_bytes(connection: Connection, tenant: str, besides: TinkerPath | None = None) -> int:
    """Of a tenant's checkpoints that have not expired, all or all but one, and of adapters that its sampling sessions
    hold and no checkpoint does."""
    query = select(func.sum(checkpoints.c.size_bytes)).where(checkpoints.c.tenant == tenant, _live(time.time()))
    if besides is not None:
        query = query.where(
            or_(
                checkpoints.c.model_id != besides.model_id,
                checkpoints.c.kind != besides.kind,
                checkpoints.c.name != besides.name,
            )
        )
    saved = int(connection.execute(query).scalar() or 0)
    return saved + unsaved_bytes(connection, tenant).get(tenant, 0)


def paused(connection: Connection, now: float) -> dict[str, float]:
    """Until when what tenants have sent is paused, in seconds since the epoch."""
    later = (futures.c.status == "pending") & (futures.c.not_before > now)
    return _by_tenant(connection, futures, func.max(futures.c.not_before), later)


def not_before(connection: Connection, request_id: str) -> float | None:
    """When a pending request may start, in seconds since the epoch; None: at once, or it has ended."""
    query = select(futures.c.not_before).where(futures.c.id == request_id, futures.c.status == "pending")
    return connection.execute(query).scalar()


@dataclass
class Held:
    """What a tenant holds now, in the order of `Limits`, but for tokens: only API processes know how many are left."""

    samples: int = 0
    models: int = 0
    stored_bytes: int = 0
    exceptions: Exceptions = field(default=(None,) * len(_NUMBERS))


def held(connection: Connection) -> dict[str, Held]:
    """By tenant: all that hold something or have exceptions."""
    pending = (futures.c.status == "pending") & futures.c.kind.in_(SAMPLES)
    living = models.c.status.in_(("creating", "ready"))
    found: dict[str, Held] = {}
    for tenant, count in _by_tenant(connection, futures, func.count(), pending).items():
        found.setdefault(tenant, Held()).samples = count
    for tenant, count in _by_tenant(connection, models, func.count(), living).items():
        found.setdefault(tenant, Held()).models = count
    size = func.sum(checkpoints.c.size_bytes)
    for tenant, total in _by_tenant(connection, checkpoints, size, _live(time.time())).items():
        found.setdefault(tenant, Held()).stored_bytes = int(total)
    for tenant, total in unsaved_bytes(connection).items():
        found.setdefault(tenant, Held()).stored_bytes += total
    for tenant, numbers in exceptions(connection).items():
        found.setdefault(tenant, Held()).exceptions = numbers
    return found


def _by_tenant(connection: Connection, table: Any, what: Any, where: Any) -> dict[str, Any]:
    query = select(table.c.tenant, what.label("amount")).where(where).group_by(table.c.tenant)
    return {row.tenant: row.amount for row in connection.execute(query)}
