"""Sessions in an API process: checks that a session is active, and ends sessions that finish or fall silent.

Knows what else must stop with a session: its samples, its pending requests, its models in the engine. Knows no engine.

`FullPlace` frees the place for full weights. A script that ends without closing its session keeps its model for
`session_timeout_s`. Meanwhile its own tenant could not even download what the script has saved, because the SDK loads
a checkpoint into a model to export it. So a new model of the same tenant ends such a session."""

from __future__ import annotations

import asyncio
import logging
import time

from skyrl.api.request_status.commands import SILENT_S
from skyrl.base.types.weights import Scope
from skyrl.base.wire.errors import RequestError
from skyrl.sampling.service import SampleService
from skyrl.storage.db.database import Database
from skyrl.storage.db.full_weights import Holder, holder
from skyrl.storage.db.models import Model, Models
from skyrl.storage.db.samplers import Samplers
from skyrl.storage.db.sessions import Session, Sessions
from skyrl.storage.doorbell import SESSIONS, Doorbell
from skyrl.storage.futures.store import FutureStore

logger = logging.getLogger(__name__)


class SessionLife:
    """Ends sessions. On a server that trains, the engine fails a session's pending requests; otherwise this process
    does."""

    def __init__(
        self,
        sessions: Sessions,
        samplers: Samplers,
        models: Models,
        futures: FutureStore,
        sampling: SampleService,
        engine: Doorbell,
        *,
        trains: bool,
        timeout_s: float,
    ) -> None:
        self._sessions = sessions
        self._samplers = samplers
        self._models = models
        self._futures = futures
        self._sampling = sampling
        self._engine = engine
        self._trains = trains
        self._timeout_s = timeout_s

    async def active(self, session_id: str, tenant: str) -> Session:
        """The tenant's session. Raises NotFound, or RequestError 410 when the session has ended."""
        session = await self._sessions.named(session_id, tenant)
        if session.status != "active":
            raise RequestError(f"session {session_id!r} is {session.status}", field="session_id", status=410)
        return session

    async def close(
        self,
        session: Session,
        status: str,
        reason: str | None,
        detail: str | None,
        *,
        silent_since: float | None = None,
    ) -> None:
        """End a session with `status`, "finished" or "expired": its samples stop, its pending requests end, and the
        engine frees its models. With `silent_since`, only if that is still its last heartbeat."""
        if await self._sessions.end(session, status, reason, detail, silent_since=silent_since):
            await self._forget(session.id)

    async def changed(self, session_id: str) -> None:
        """Another process has changed or ended this session."""
        if await self._sessions.reread(session_id):
            await self._forget(session_id)

    async def check(self) -> None:
        """Close the sessions that are silent, and forget those that another process has ended."""
        found = await self._sessions.look(self._timeout_s)
        for session_id in found.ended:
            await self._forget(session_id)
        for session, heartbeat_at in found.silent:
            logger.info("session %s is silent; closing it", session.id)
            await self.close(session, "expired", None, None, silent_since=heartbeat_at)

    async def _forget(self, session_id: str) -> None:
        """The session has ended. Fail the requests that arrived before this process learned of it."""
        self._sessions.forget(session_id)
        self._samplers.forget_session(session_id)
        self._models.forget_session(session_id)
        self._sampling.cancel(self._futures.drop_session(session_id))
        if not self._trains:
            await self._futures.fail_session(session_id)
        self._engine.ring([SESSIONS])


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
