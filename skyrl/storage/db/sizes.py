"""How many things the database holds: for operators, over all tenants."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from skyrl.base.types.scope import EVERYTHING, Scope
from skyrl.storage.db.adapter_versions import OPEN_ADAPTER
from skyrl.storage.db.models import LIVING, models
from skyrl.storage.db.samplers import samplers
from skyrl.storage.db.scopes import in_scope
from skyrl.storage.db.sessions import sessions

ACTIVE_S = 300.0
"""A tenant is active if one of its sessions was heard of within this time. Clients send a heartbeat every 10 s."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`models` are in training, `sessions` are active, `adapters` are versions that open sampling sessions need."""

    models: int
    sessions: int
    tenants: int
    adapters: int


def sizes(connection: Connection, now: float, scope: Scope = EVERYTHING) -> Sizes:
    """The models and adapters are those in the scope."""
    training = models.c.status.in_(LIVING)
    living = select(func.count()).select_from(models).where(training, in_scope(models.c.base_model, scope))
    active = sessions.c.status == "active"
    open_sessions = select(func.count()).select_from(sessions).where(active)
    tenants = select(func.count(sessions.c.tenant.distinct())).where(active, sessions.c.heartbeat_at > now - ACTIVE_S)
    versions = select(func.count(samplers.c.weights.distinct())).where(
        OPEN_ADAPTER, in_scope(samplers.c.base_model, scope)
    )
    return Sizes(*(connection.execute(query).scalar_one() for query in (living, open_sessions, tenants, versions)))
