"""A database that repeats reads and writes while it is away, locked or full, so that they do not fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from skyrl.runtime.processes.backoff import Backoff
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import is_transient, reason

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0


class RetryingDatabase(Database):
    """The engine waits for its database, because an engine that ends must recover all its models.

    A write is also repeated when the connection broke during its commit, so it may be applied twice. Therefore every
    write must have the same effect when it is applied twice, or must check first whether it was applied.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._stopped_retrying = threading.Event()

    def stop_retrying(self) -> None:
        """Raise errors at once from now on, also in calls that wait now: the process is about to end."""
        self._stopped_retrying.set()

    def read(self, query: Callable[[Connection], T]) -> T:
        return self._retrying(lambda: super(RetryingDatabase, self).read(query))

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        return self._retrying(lambda: super(RetryingDatabase, self).write(change, power_safe=power_safe))

    def _retrying(self, work: Callable[[], T]) -> T:
        backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S)
        while True:
            try:
                return work()
            except SQLAlchemyError as error:
                if not is_transient(error) or self._stopped_retrying.is_set():
                    raise
                retry_s = backoff.pause()
                logger.error("the database cannot be used, tried again in %g s: %s", retry_s, reason(error))
            self._stopped_retrying.wait(retry_s)
