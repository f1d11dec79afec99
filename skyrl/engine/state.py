"""What the engine tells the world: the engine_state row, written here and nowhere else, and a ring for the API."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from skyrl.backends.base import ModelLimits
from skyrl.db import engine_state
from skyrl.db.database import Database
from skyrl.db.faults import reason
from skyrl.db.fence import Fence
from skyrl.notify.doorbell import STATE, Doorbell

logger = logging.getLogger(__name__)


class EngineStatePublisher:
    """Writes the row, and writes nothing once the server has lost its claim: the row is then another engine's.

    `publish_url` is the InferenceStatePublisher that the inference group calls. The other methods wait for the database
    on the calling thread; threads may share them.
    """

    def __init__(self, database: Database, api: Doorbell, fence: Fence) -> None:
        self._database = database
        self._api = api
        self._fence = fence
        self._publishing = threading.Lock()
        self._newest = 0
        """Counts what was to be published: only the newest is."""
        self._unpublished: Callable[[], None] | None = None

    def _write(self, change: Callable[[Connection], object]) -> None:
        def unless_displaced(connection: Connection) -> None:
            if self._fence.holds(connection):
                change(connection)

        self._database.write(unless_displaced)

    async def publish_url(self, url: str | None) -> None:
        """A failed write is logged and never breaks the controller; the next heartbeat tries again."""
        self._newest += 1
        await asyncio.to_thread(self._publish, url, self._newest)

    def _publish(self, url: str | None, number: int) -> None:
        with self._publishing:
            if number != self._newest:
                return
            self._unpublished = None
            try:
                self._write(lambda c: engine_state.publish_url(c, url))
            except SQLAlchemyError as error:
                logger.error("the inference endpoint %s could not be published yet: %s", url, error)
                self._unpublished = lambda: self._publish(url, number)
                return
        logger.info("inference endpoint: %s", url)
        self._api.ring([STATE])

    def training(self, *, ready: bool, reason: str, limits: ModelLimits | None = None) -> None:
        self._write(
            lambda c: engine_state.publish_training(
                c,
                ready=ready,
                reason=reason,
                vocab_size=limits.vocab_size if limits is not None else None,
                max_context=limits.max_context if limits is not None else None,
            )
        )
        self._api.ring([STATE])

    def beat(self) -> None:
        self._write(engine_state.beat)
        if (again := self._unpublished) is not None:
            again()

    def clear(self, why: str) -> None:
        """Nothing runs any more. A database that is away is not told; the launcher tries once more."""
        try:
            self._write(lambda c: engine_state.clear(c, why))
        except SQLAlchemyError as error:
            logger.error("the database was not told that the engine has stopped: %s", reason(error))
        self._api.ring([STATE])
