"""What an API process does when another process tells it that something has changed. `skyrl.notify` lists the words."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from skyrl.api.readiness import EngineWatch
from skyrl.db.faults import DatabaseError, is_transient, reason
from skyrl.futures.store import FutureStore
from skyrl.notify.doorbell import STATE
from skyrl.notify.peers import PeerNotices
from skyrl.sampling.service import SampleService

logger = logging.getLogger(__name__)


class News:
    """`session_changed` is called with the id of a session that another API process has changed or ended."""

    def __init__(
        self,
        futures: FutureStore,
        sampling: SampleService,
        watch: EngineWatch,
        session_changed: Callable[[str], Awaitable[object]],
    ) -> None:
        self._futures = futures
        self._sampling = sampling
        self._watch = watch
        self._session_changed = session_changed

    async def from_engine(self, words: list[str]) -> None:
        """The engine of this server has settled requests, or its state has changed."""
        try:
            if STATE in words:
                await self._watch.refresh()
            await self._futures.read_outcomes(words)
        except DatabaseError as error:
            _put_off("the engine", error)

    async def from_peers(self, words: PeerNotices) -> None:
        """Another API process has settled requests, or ended or changed sessions."""
        for sampling_session_id in words.sampling_sessions:
            self._futures.ends.ended_elsewhere(sampling_session_id)
        try:
            self._sampling.cancel(await self._futures.read_outcomes(words.requests))
            for session_id in words.sessions:
                await self._session_changed(session_id)
        except DatabaseError as error:
            _put_off("another API process", error)


def _put_off(teller: str, error: DatabaseError) -> None:
    """The next look, which needs no word, finds what could not be read now."""
    if not is_transient(error):
        raise error
    logger.warning("what %s told could not be read: %s", teller, reason(error))
