"""Publishing the state of a base model: writes its row of the table engine_state, then rings the API.

The engine does so, and for a base model that is only sampled from, the launcher."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from skyrl.base.types.context_limits import ContextLimits
from skyrl.storage.db import engine_state
from skyrl.storage.db.database import Connection, Database, Fence
from skyrl.storage.db.faults import DatabaseError, reason
from skyrl.storage.doorbell import STATE, Doorbell

logger = logging.getLogger(__name__)
_UNKNOWN = ContextLimits()


class EngineStatePublisher:
    """Writes the row, but never after the server has lost its claim: the row is then another engine's.

    `publish_url` is the InferenceStatePublisher of the EngineGroup. The other methods wait for the database on the
    calling thread; several threads may call them.
    """

    def __init__(self, database: Database, api: Doorbell, fence: Fence, key: str = engine_state.ONLY) -> None:
        """`key`: that of the row."""
        self._database = database
        self._api = api
        self._fence = fence
        self._key = key
        self._publishing = threading.Lock()
        self._newest_number = 0
        """The number of the newest URL. Older URLs are not published any more."""
        self._retry_publishing: Callable[[], None] | None = None
        """Publishes the URL again, after a write of it has failed."""

    def _write(self, change: Callable[[Connection], object]) -> None:
        def unless_displaced(connection: Connection) -> None:
            if self._fence.holds(connection):
                change(connection)

        self._database.write(unless_displaced)

    async def publish_url(self, url: str | None) -> None:
        """Raises nothing: a write that fails is logged, and the next heartbeat tries again."""
        self._newest_number += 1
        await asyncio.to_thread(self._publish, url, self._newest_number)

    def _publish(self, url: str | None, number: int) -> None:
        with self._publishing:
            if number != self._newest_number:
                return
            self._retry_publishing = None
            try:
                self._write(lambda c: engine_state.publish_url(c, url, self._key))
            except DatabaseError as error:
                logger.error("the inference endpoint %s could not be published yet: %s", url, error)
                self._retry_publishing = lambda: self._publish(url, number)
                return
        logger.info("inference endpoint: %s", url)
        self._api.ring([STATE])

    def training(
        self, *, ready: bool, reason: str, limits: ContextLimits = _UNKNOWN, layers: str | None = None
    ) -> None:
        self._write(
            lambda c: engine_state.publish_training(
                c,
                ready=ready,
                reason=reason,
                vocab_size=limits.vocab_size,
                max_context=limits.max_context,
                layers=layers,
                key=self._key,
            )
        )
        self._api.ring([STATE])

    def beat(self, activity: str | None) -> None:
        """Publish a heartbeat, and what the engine does now."""
        self._write(lambda c: engine_state.beat(c, activity, self._key))
        self.publish_missed()

    def publish_missed(self) -> None:
        """Publish the URL if the last write of it has failed."""
        if (retry := self._retry_publishing) is not None:
            retry()

    def clear(self, why: str) -> None:
        """Publish that the engine has stopped. A write that fails is logged; the launcher tries once more."""
        try:
            self._write(lambda c: engine_state.clear(c, why, self._key))
        except DatabaseError as error:
            logger.error("the database was not told that the engine has stopped: %s", reason(error))
        self._api.ring([STATE])
