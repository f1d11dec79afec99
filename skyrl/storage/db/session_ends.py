"""Closes models, sampling sessions and pending requests of sessions that have ended."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, select, union, update

from skyrl.storage.db.adapter_versions import OPEN, samplers
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import MAX_NAMED, end_requests_of_sessions
from skyrl.storage.db.models import models
from skyrl.storage.db.sessions import sessions

logger = logging.getLogger(__name__)

_LIVING_MODEL = models.c.status.in_(("creating", "ready"))


@dataclass(frozen=True)
class Ended:
    """Ids of the models that were closed, and of the requests that were failed."""

    model_ids: list[str]
    request_ids: list[str]


def over_sessions(connection: Connection) -> list[str]:
    """Ids of ended sessions that still have open models or sampling sessions, at most MAX_NAMED.

    The query starts from the open models and sampling sessions, so it does not read the many closed rows.
    """

    def has_ended(session_id: ColumnElement[str]) -> ColumnElement[bool]:
        return ~select(sessions.c.id).where(sessions.c.id == session_id, sessions.c.status == "active").exists()

    queries = (
        select(models.c.session_id).where(_LIVING_MODEL, has_ended(models.c.session_id)),
        select(samplers.c.session_id).where(OPEN, has_ended(samplers.c.session_id)),
    )
    return list(connection.execute(union(*queries).limit(MAX_NAMED)).scalars())


def end_sessions(database: Database) -> Ended:
    """Close the models and sampling sessions of ended sessions, and fail their pending requests."""
    session_ids = database.read(over_sessions)
    ended = Ended([], [])
    if not session_ids:
        return ended

    def close(connection: Connection) -> None:
        open_models = and_(models.c.session_id.in_(session_ids), _LIVING_MODEL)
        model_ids = [row.id for row in connection.execute(select(models.c.id).where(open_models))]
        connection.execute(update(models).where(open_models).values(status="closed"))
        open_samplers = update(samplers).where(samplers.c.session_id.in_(session_ids), OPEN)
        connection.execute(open_samplers.values(status="closed", closed_at=time.time()))
        failed = end_requests_of_sessions(connection, session_ids, time.time())
        # `write` repeats this when the connection breaks during the commit. If the commit had succeeded, the repetition
        # finds nothing to close. So collect the ids of all tries.
        ended.model_ids.extend(model_ids)
        ended.request_ids.extend(failed)

    database.write(close)
    logger.info("sessions over: %s; models closed: %s", session_ids, ended.model_ids)
    return ended
