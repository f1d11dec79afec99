"""Statements about amounts in use: of one tenant, with its exceptions from the quotas, and for operators of all tenants
(`sizes`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select, update

from skyrl.base.types.requests import SAMPLES
from skyrl.base.types.weights import EVERYTHING, Scope
from skyrl.base.wire.paths import TinkerPath
from skyrl.storage.db.adapter_versions import OPEN_ADAPTER, unsaved_bytes
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.models import LIVING, models
from skyrl.storage.db.samplers import samplers
from skyrl.storage.db.scopes import in_scope, live
from skyrl.storage.db.sessions import active_sessions_of, sessions
from skyrl.storage.db.tables import FutureRow, QuotaRow, UploadRow
from skyrl.storage.shares import SavesDisk, is_over_on_disk

quotas = QuotaRow.__table__  # type: ignore[attr-defined]
futures = FutureRow.__table__  # type: ignore[attr-defined]
uploads = UploadRow.__table__  # type: ignore[attr-defined]

_NUMBERS = (quotas.c.requests_in_flight, quotas.c.tokens_per_minute, quotas.c.models, quotas.c.stored_bytes)
"""In the order of the fields of `QuotaLimits`."""

Exceptions = tuple[int | None, ...]
"""One tenant's numbers, in the order of the fields of `QuotaLimits`. None: the configuration's number; -1: no quota."""


def exceptions(connection: Connection) -> dict[str, Exceptions]:
    """The exceptions of all tenants that have any."""
    return {row[0]: tuple(row[1:]) for row in connection.execute(select(quotas.c.tenant, *_NUMBERS))}


def exceptions_of(connection: Connection, tenant: str) -> Exceptions:
    """One tenant's exceptions; all None if it has none."""
    row = connection.execute(select(*_NUMBERS).where(quotas.c.tenant == tenant)).first()
    return (None,) * len(_NUMBERS) if row is None else tuple(row)


def change(connection: Connection, tenant: str, values: Mapping[str, int | None]) -> None:
    """Set the given exceptions of a tenant. Its other exceptions do not change."""
    changed = {**values, "updated_at": time.time()}
    if connection.execute(update(quotas).where(quotas.c.tenant == tenant).values(changed)).rowcount == 0:
        connection.execute(insert(quotas), {"tenant": tenant} | changed)


def clear(connection: Connection, tenant: str) -> bool:
    """Delete a tenant's exceptions. Returns whether it had any."""
    return connection.execute(delete(quotas).where(quotas.c.tenant == tenant)).rowcount > 0


def active_sessions(connection: Connection, tenant: str) -> int:
    """The number of a tenant's active sessions."""
    return connection.execute(select(func.count()).select_from(sessions).where(active_sessions_of(tenant))).scalar_one()


def living_models(connection: Connection, tenant: str) -> int:
    """The number of models in training in a tenant's active sessions."""
    active = select(sessions.c.id).where(active_sessions_of(tenant))
    living = models.c.session_id.in_(active) & models.c.status.in_(LIVING)
    return connection.execute(select(func.count()).select_from(models).where(living)).scalar_one()


def living_samplers(connection: Connection, tenant: str) -> int:
    """The number of sampling sessions in a tenant's active sessions."""
    active = select(sessions.c.id).where(active_sessions_of(tenant))
    query = select(func.count()).select_from(samplers).where(samplers.c.session_id.in_(active))
    return connection.execute(query).scalar_one()


def stored_bytes(connection: Connection, tenant: str, besides: TinkerPath | None = None) -> int:
    """Bytes of a tenant's live checkpoints, of adapters that its sampling sessions need and no checkpoint has, and of
    unfinished uploads as they were announced. Leaves out the checkpoint `besides`."""
    return _saved_bytes(connection, tenant, besides) + _unsaved_bytes(connection, tenant)


def _saved_bytes(connection: Connection, tenant: str, besides: TinkerPath | None) -> int:
    query = select(func.sum(checkpoints.c.size_bytes)).where(checkpoints.c.tenant == tenant, live())
    if besides is not None:
        query = query.where(
            or_(
                checkpoints.c.model_id != besides.model_id,
                checkpoints.c.kind != besides.kind,
                checkpoints.c.name != besides.name,
            )
        )
    return int(connection.execute(query).scalar() or 0)


def _unsaved_bytes(connection: Connection, tenant: str) -> int:
    arriving = select(func.sum(uploads.c.most_bytes)).where(uploads.c.tenant == tenant, _unfinished(time.time()))
    return unsaved_bytes(connection, tenant).get(tenant, 0) + int(connection.execute(arriving).scalar() or 0)


class StoredBytes:
    """`stored_bytes` of a tenant, for a check before work and one in the transaction that adds a checkpoint. With
    100,000 checkpoints the sum takes 50 ms: it is made once, and later only the checkpoints since are added."""

    def __init__(self, tenant: str, besides: TinkerPath | None = None) -> None:
        self._tenant, self._besides = tenant, besides
        self._summed: tuple[int, int] | None = None
        """The newest checkpoint's number, and the sum of all checkpoints."""

    def now(self, connection: Connection) -> int:
        if self._summed is None:
            newest = connection.execute(select(func.coalesce(func.max(checkpoints.c.id), 0))).scalar_one()
            self._summed = newest, _saved_bytes(connection, self._tenant, self._besides)
        newest, saved = self._summed
        # No index of tenants serves it: a tenant has more checkpoints than were made since.
        since = (checkpoints.c.id > newest) & (func.coalesce(checkpoints.c.tenant, "") == self._tenant)
        later = int(connection.execute(select(func.sum(checkpoints.c.size_bytes)).where(since)).scalar() or 0)
        return saved + later + _unsaved_bytes(connection, self._tenant)


def over_disk_share(connection: Connection, stored_bytes: StoredBytes, disk: SavesDisk | None) -> str | None:
    """A sentence if the tenant's stored bytes are its share of the disk of the checkpoints, else None. Sums them only
    if the disk is so full that they may be. `disk` is as in `saves_disk`."""
    free = None if disk is None else disk.tight()
    if free is None or not is_over_on_disk(stored := stored_bytes.now(connection), free):
        return None
    return (
        f"this API key's tenant has {stored} bytes of checkpoints and of weights saved for sampling, which is its "
        f"share of the server's disk while {max(0, int(free))} bytes are free for saves (min_free_disk_bytes): delete "
        "checkpoints or give them a time to live, or finish sessions that are done"
    )


def _unfinished(now: float) -> ColumnElement[bool]:
    return uploads.c.expires_at > now


def paused(connection: Connection, now: float) -> dict[str, float]:
    """By tenant with pending requests that must not start yet: when the last of them may start, in seconds since the
    epoch."""
    later = (futures.c.status == "pending") & (futures.c.not_before > now)
    return _by_tenant(connection, futures, func.max(futures.c.not_before), later)


def not_before(connection: Connection, request_id: str) -> float | None:
    """When a pending request may start, in seconds since the epoch. None if it may start at once or has ended."""
    query = select(futures.c.not_before).where(futures.c.id == request_id, futures.c.status == "pending")
    return connection.execute(query).scalar()


@dataclass
class Held:
    """The amounts that a tenant uses now, without tokens per minute, which only the API processes know."""

    samples: int = 0
    models: int = 0
    stored_bytes: int = 0
    exceptions: Exceptions = field(default=(None,) * len(_NUMBERS))


def held(connection: Connection) -> dict[str, Held]:
    """By tenant: the amounts of all tenants that use anything or have exceptions."""
    pending = (futures.c.status == "pending") & futures.c.kind.in_(SAMPLES)
    living = models.c.status.in_(LIVING)
    amounts: dict[str, Held] = {}
    for tenant, count in _by_tenant(connection, futures, func.count(), pending).items():
        amounts.setdefault(tenant, Held()).samples = count
    for tenant, count in _by_tenant(connection, models, func.count(), living).items():
        amounts.setdefault(tenant, Held()).models = count
    size = func.sum(checkpoints.c.size_bytes)
    for tenant, total in _by_tenant(connection, checkpoints, size, live()).items():
        amounts.setdefault(tenant, Held()).stored_bytes = int(total)
    for tenant, total in unsaved_bytes(connection).items():
        amounts.setdefault(tenant, Held()).stored_bytes += total
    for tenant, total in _by_tenant(
        connection, uploads, func.sum(uploads.c.most_bytes), _unfinished(time.time())
    ).items():
        amounts.setdefault(tenant, Held()).stored_bytes += int(total)
    for tenant, numbers in exceptions(connection).items():
        amounts.setdefault(tenant, Held()).exceptions = numbers
    return amounts


def _by_tenant(connection: Connection, table: Any, aggregate: Any, where: Any) -> dict[str, Any]:
    query = select(table.c.tenant, aggregate.label("amount")).where(where).group_by(table.c.tenant)
    return {row.tenant: row.amount for row in connection.execute(query)}


ACTIVE_S = 300.0
"""A tenant is active if one of its sessions was heard of within this time. Clients send a heartbeat every 10 s."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`models` are in training, `sessions` are active, `adapters` are versions that open sampling sessions need."""

    models: int
    sessions: int
    tenants: int
    adapters: int


def servable(connection: Connection, scope: Scope = EVERYTHING) -> int:
    """How many versions of adapters open sampling sessions need. Reads all of these, so it is not for each request."""
    versions = func.count(samplers.c.weights.distinct())
    return connection.execute(select(versions).where(OPEN_ADAPTER, in_scope(samplers.c.base_model, scope))).scalar_one()


def sizes(connection: Connection, now: float, scope: Scope = EVERYTHING) -> Sizes:
    """The models and adapters are those in the scope."""
    training = models.c.status.in_(LIVING)
    living = select(func.count()).select_from(models).where(training, in_scope(models.c.base_model, scope))
    active = sessions.c.status == "active"
    open_sessions = select(func.count()).select_from(sessions).where(active)
    tenants = select(func.count(sessions.c.tenant.distinct())).where(active, sessions.c.heartbeat_at > now - ACTIVE_S)
    numbers = (connection.execute(query).scalar_one() for query in (living, open_sessions, tenants))
    return Sizes(*numbers, adapters=servable(connection, scope))
