"""Custom losses: stored when a client has sent one, found for the passes of its session, deleted some time after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from skyrl.base.types.custom_loss import MAX_LOSSES, MAX_LOSSES_OF_TENANT
from skyrl.base.wire.errors import OverQuota, RequestError
from skyrl.storage.db.models import LIVING, models
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.tables import CustomLossRow

losses: Any = CustomLossRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StoredLoss:
    """`body`: as `encode_loss` makes it."""

    id: str
    session_id: str
    tenant: str
    seq_id: int
    body: bytes


def add(connection: Connection, loss: StoredLoss) -> None:
    """Insert it unless it is there, which happens when a request is repeated. Raises RequestError if its id stands for
    another loss, or if the session or the tenant has too many."""
    stored = connection.execute(select(losses.c.body).where(losses.c.id == loss.id)).scalar()
    if stored is not None:
        if stored != loss.body:
            raise RequestError(f"{loss.seq_id} was used before for another loss", field="custom_loss_seq_id")
        return
    of_session = select(func.count()).select_from(losses).where(losses.c.session_id == loss.session_id)
    if connection.execute(of_session).scalar_one() >= MAX_LOSSES:
        raise RequestError(
            f"a session may create {MAX_LOSSES} custom losses; use one more than once", field="session_id"
        )
    of_tenant = select(func.count()).select_from(losses).where(losses.c.tenant == loss.tenant)
    if connection.execute(of_tenant).scalar_one() >= MAX_LOSSES_OF_TENANT:
        raise OverQuota(
            "custom_losses",
            f"custom losses: {MAX_LOSSES_OF_TENANT} are stored; each is deleted a day after its session has ended",
        )
    connection.execute(insert(losses), {**loss.__dict__, "created_at": time.time()})


def find(connection: Connection, loss_id: str, session_id: str, tenant: str) -> bytes | None:
    """The body of a loss of this session."""
    own = losses.c.id == loss_id, losses.c.session_id == session_id, losses.c.tenant == tenant
    return connection.execute(select(losses.c.body).where(*own)).scalar()


def forget(connection: Connection, ended_before: float, limit: int) -> int:
    """Delete at most `limit` losses of sessions that ended before `ended_before` (seconds since the epoch) and have no
    living model, whose passes recovery may repeat. Returns the number of deleted rows."""
    living = select(models.c.id).where(models.c.session_id == losses.c.session_id, models.c.status.in_(LIVING))
    old = (
        select(losses.c.id)
        .join(sessions, sessions.c.id == losses.c.session_id)
        .where(sessions.c.status != "active", sessions.c.ended_at < ended_before, ~living.exists())
        .limit(limit)
    )
    return connection.execute(delete(losses).where(losses.c.id.in_(old))).rowcount
