"""What an API process does when another process tells it of a change. `skyrl.storage.notices` carries and lists the
notices."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from skyrl.sampling.service import SampleService
from skyrl.storage.db.faults import DatabaseError, is_transient, reason
from skyrl.storage.doorbell import STATE
from skyrl.storage.futures.store import FutureStore
from skyrl.storage.notices import PeerNotices

logger = logging.getLogger(__name__)


class NoticeHandler:
    """Reads from the database what a notice names. `refresh` reads the engines' states. `session_changed` is called
    with the id of a session that another API process has changed or ended, `agent_session_ended` with that of an agent
    session that another API process has ended."""

    def __init__(
        self,
        futures: FutureStore,
        sampling: SampleService,
        refresh: Callable[[], Awaitable[object]],
        session_changed: Callable[[str], Awaitable[object]],
        agent_session_ended: Callable[[str], Awaitable[object]],
    ) -> None:
        self._futures = futures
        self._sampling = sampling
        self._refresh = refresh
        self._session_changed = session_changed
        self._agent_session_ended = agent_session_ended

    async def from_engine(self, notices: list[str]) -> None:
        """The engine of this server has settled the requests with these ids; or, for STATE, its state has changed."""
        try:
            if STATE in notices:
                await self._refresh()
            await self._futures.read_outcomes(notices)
        except DatabaseError as error:
            _log_unread_notice("the engine", error)

    async def from_peers(self, notices: PeerNotices) -> None:
        """Another API process has settled requests, or ended or changed sessions."""
        for sampling_session_id in notices.sampling_sessions:
            self._futures.ends.ended_elsewhere(sampling_session_id)
        try:
            self._sampling.cancel(await self._futures.read_outcomes(notices.requests))
            for session_id in notices.sessions:
                await self._session_changed(session_id)
            for session_id in notices.agent_sessions:
                await self._agent_session_ended(session_id)
        except DatabaseError as error:
            _log_unread_notice("another API process", error)


def _log_unread_notice(sender: str, error: DatabaseError) -> None:
    """Log that the database was away. The repeated work in `server.py` soon reads the same without a notice. Raises
    other errors."""
    if not is_transient(error):
        raise error
    logger.warning("what %s told could not be read: %s", sender, reason(error))
