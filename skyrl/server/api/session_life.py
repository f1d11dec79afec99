"""Sessions in an API process: checks that a session is active, and ends sessions that finish or fall silent.

Knows what else must stop with a session: its samples, its pending requests, its models in the engine.
"""

from __future__ import annotations

import logging

from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.sampling.service import SampleService
from skyrl.storage.db.models import Models
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
        session = await self._sessions.find(session_id, tenant)
        if session is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
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
