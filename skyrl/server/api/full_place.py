"""The place for full weights: a client that has gone gives it up.

A script that ends without closing its session keeps its model for `session_timeout_s`. Meanwhile its own tenant could
not even download what the script has saved, because the SDK loads a checkpoint into a model to export it. So a new
model of the same tenant ends such a session. Knows no engine.
"""

from __future__ import annotations

import asyncio
import logging
import time

from skyrl.base.types.weights import Scope
from skyrl.server.api.session_life import SessionLife
from skyrl.server.request_status.runs import SILENT_S
from skyrl.storage.db.database import Database
from skyrl.storage.db.full_weights import Holder, holder
from skyrl.storage.db.models import Model
from skyrl.storage.db.sessions import Sessions

logger = logging.getLogger(__name__)

WATCHED_S = 12.0
"""A session is ended only if it has sent no heartbeat in this time while it was watched: clients send one every ten
seconds, and one that an API process could not take before is no reason."""
WAIT_S = 45.0
"""How long a new model waits for the place, at most: SILENT_S, and some time in which the engine frees the model. The
SDK waits 60 s for an answer."""
LOOK_S = 0.5


class FullPlace:
    """Frees the place for full weights."""

    def __init__(self, database: Database, sessions: Sessions, session_life: SessionLife) -> None:
        self._database = database
        self._sessions = sessions
        self._session_life = session_life

    async def free(self, model: Model, scope: Scope) -> None:
        """Wait until a model of the same tenant whose client may have gone has lost the place, or its client is heard
        of. Returns at once if another tenant has the place, and while requests of the client have not ended."""
        began = time.monotonic()
        first: Holder | None = None
        while (watched_s := time.monotonic() - began) < WAIT_S:
            other = await self._database.read_async(lambda c: holder(c, model.id, scope))
            if other is None or other.tenant != model.tenant or other.session_id == model.session_id:
                return
            if other.session_is_active:
                first = first or other
                if other.is_asked or (other.model_id, other.heartbeat_at) != (first.model_id, first.heartbeat_at):
                    return
                if watched_s >= WATCHED_S and time.time() - other.heartbeat_at >= SILENT_S:
                    await self._end(other)
            await asyncio.sleep(LOOK_S)

    async def _end(self, other: Holder) -> None:
        if (session := await self._sessions.find(other.session_id, other.tenant)) is not None:
            logger.info("session %s is silent, and a new model needs its place; closing it", session.id)
            await self._session_life.close(session, "expired", None, None, silent_since=other.heartbeat_at)
