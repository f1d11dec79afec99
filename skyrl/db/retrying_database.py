"""A database that is waited for: while it is away, locked or full, who reads or writes waits instead of failing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from skyrl.db.database import Database
from skyrl.db.faults import is_transient, reason

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0


class RetryingDatabase(Database):
    """For the engine, which has nothing better to do than to wait: were it to end, it would have to recover.

    A write whose commit was under way when the connection broke is repeated, so it may be applied twice: it must be one
    that is the same then, or one that looks whether it is there.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._stopped_retrying = threading.Event()

    def stop_retrying(self) -> None:
        """Errors are raised at once from now on, also to who waits already: the process is to end."""
        self._stopped_retrying.set()

    def read(self, query: Callable[[Connection], T]) -> T:
        return self._retrying(lambda: super(RetryingDatabase, self).read(query))

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        return self._retrying(lambda: super(RetryingDatabase, self).write(change, power_safe=power_safe))

    def _retrying(self, work: Callable[[], T]) -> T:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return work()
            except SQLAlchemyError as error:
                if not is_transient(error) or self._stopped_retrying.is_set():
                    raise
                logger.error("the database cannot be used, tried again in %g s: %s", retry_s, reason(error))
            if self._stopped_retrying.wait(retry_s):
                retry_s = 0.0
            retry_s = min(2 * retry_s, MAX_RETRY_S)
