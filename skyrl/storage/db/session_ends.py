"""Closes models, sampling sessions and pending requests of sessions that have ended.

If a server has several engines, each closes the models of its base model and fails their commands. Sampling sessions
and samples are closed by the engine that comes first. Two engines may do so at once: write transactions run one at a
time, and each finds only what is still open. A session may have 100,000 sampling sessions: they are closed in steps,
between which other writers run."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, select, union, update

from skyrl.base.types.weights import EVERYTHING, Scope
from skyrl.storage.db.adapter_versions import OPEN, samplers
from skyrl.storage.db.database import MAX_NAMED, Database
from skyrl.storage.db.futures import end_requests_of_sessions
from skyrl.storage.db.models import LIVING, models
from skyrl.storage.db.scopes import in_scope
from skyrl.storage.db.sessions import sessions

logger = logging.getLogger(__name__)

CLOSE_ROWS, PAUSE_S = 250, 0.01
"""How many sampling sessions one transaction closes, and the pause between two."""


@dataclass(frozen=True)
class Ended:
    """Ids of the models that were closed, and of the requests that were failed."""

    model_ids: list[str]
    request_ids: list[str]


def _open_models(scope: Scope) -> ColumnElement[bool]:
    return and_(models.c.status.in_(LIVING), in_scope(models.c.base_model, scope))


def over_sessions(connection: Connection, scope: Scope = EVERYTHING) -> list[str]:
    """Ids of ended sessions that still have open models in the scope or open sampling sessions, at most MAX_NAMED.

    The query starts from the open models and sampling sessions, so it does not read the many closed rows.
    """

    def has_ended(session_id: ColumnElement[str]) -> ColumnElement[bool]:
        return ~select(sessions.c.id).where(sessions.c.id == session_id, sessions.c.status == "active").exists()

    # Of each session once, because a session has many sampling sessions.
    sampled = select(samplers.c.session_id).where(OPEN).distinct().subquery()
    queries = (
        select(models.c.session_id).where(_open_models(scope), has_ended(models.c.session_id)),
        select(sampled.c.session_id).where(has_ended(sampled.c.session_id)),
    )
    return list(connection.execute(union(*queries).limit(MAX_NAMED)).scalars())


def end_sessions(database: Database, scope: Scope = EVERYTHING) -> Ended:
    """Close the models in the scope and the sampling sessions of ended sessions, and fail their pending requests."""
    session_ids = database.read(lambda c: over_sessions(c, scope))
    ended = Ended([], [])
    if not session_ids:
        return ended

    def close(connection: Connection) -> None:
        open_models = and_(models.c.session_id.in_(session_ids), _open_models(scope))
        model_ids = [row.id for row in connection.execute(select(models.c.id).where(open_models))]
        connection.execute(update(models).where(open_models).values(status="closed"))
        failed = end_requests_of_sessions(connection, session_ids, time.time(), scope=scope)
        # `write` repeats this when the connection breaks during the commit. If the commit had succeeded, the repetition
        # finds nothing to close. So collect the ids of all tries.
        ended.model_ids.extend(model_ids)
        ended.request_ids.extend(failed)

    database.write(close)
    while database.write(lambda c: _close_samplers(c, session_ids)) == CLOSE_ROWS:
        time.sleep(PAUSE_S)
    logger.info("sessions over: %s; models closed: %s", session_ids, ended.model_ids)
    return ended


def _close_samplers(connection: Connection, session_ids: list[str]) -> int:
    """Close at most CLOSE_ROWS open sampling sessions of these sessions. Returns how many."""
    some = select(samplers.c.id).where(samplers.c.session_id.in_(session_ids), OPEN).limit(CLOSE_ROWS)
    closing = update(samplers).where(samplers.c.id.in_(some)).values(status="closed", closed_at=time.time())
    return connection.execute(closing).rowcount
