"""What the engine tells the world: the engine_state row, written here and nowhere else, and a ring for the API."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from skyrl.backends.base import ModelLimits
from skyrl.db import engine_state
from skyrl.db.database import Database
from skyrl.db.faults import reason
from skyrl.futures.doorbell import Doorbell

logger = logging.getLogger(__name__)


class EngineStatePublisher:
    """Writes the row for the engine of `server`, until another server trains on the database: that one's state is not
    to be overwritten by what a server that was cut off for long has to say when it comes back. `publish_url` is the
    InferenceStatePublisher that the inference group calls."""

    def __init__(self, database: Database, api: Doorbell, server: str) -> None:
        self._database = database
        self._api = api
        self._server = server
        self._unpublished: Callable[[], None] | None = None

    def _write(self, change: Callable[[Connection], object]) -> None:
        def unless_taken(connection: Connection) -> None:
            if not engine_state.taken_from(connection, self._server):
                change(connection)

        self._database.write(unless_taken)

    def publish_url(self, url: str | None) -> None:
        """A failed write is logged and never breaks the controller; the next heartbeat tries again."""
        self._unpublished = None
        try:
            self._write(lambda c: engine_state.publish_url(c, url))
        except SQLAlchemyError as error:
            logger.error("the inference endpoint %s could not be published yet: %s", url, error)
            self._unpublished = lambda: self.publish_url(url)
            return
        logger.info("inference endpoint: %s", url)
        self._api.ring(["state"])

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
        self._api.ring(["state"])

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
        self._api.ring(["state"])
