"""Work that is repeated while the database is away, locked or full.

`RetryingDatabase` repeats its reads and writes, so that they do not fail. `repeat` runs an action every few seconds
while a process lives, and logs the rounds that fail: one line when the database goes away, and one when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
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


EARLIEST_FIRST = 0.5
"""The earliest first round, in periods after the start."""


class Rounds:
    """Logs failed rounds of one repeated action. When the database goes away it logs one line, and another line when
    the database is back, both without a traceback."""

    def __init__(self, name: str, period_s: float) -> None:
        self._name = name
        self._period_s = period_s
        self._away = False

    def went_well(self) -> None:
        if self._away:
            self._away = False
            logger.info("%s: the database can be used again", self._name)

    def failed(self, error: Exception) -> None:
        if not is_transient(error):
            logger.error("%s failed; it is tried again in %g s", self._name, self._period_s, exc_info=error)
        elif not self._away:
            self._away = True
            logger.error(
                "%s: the database cannot be used, tried every %g s: %s", self._name, self._period_s, reason(error)
            )


async def repeat(
    name: str,
    period_s: float,
    action: Callable[[], Awaitable[object]],
    *,
    at_once: bool = False,
    rung: asyncio.Event | None = None,
) -> None:
    """Run `action` every `period_s` seconds until cancelled. A round that fails is logged, and the next round runs. The
    first round comes up to half a period earlier, so that processes that start together do not write together; or
    `at_once`. Setting `rung` makes the next round run at once."""
    rung = rung or asyncio.Event()
    rounds = Rounds(name, period_s)
    pause_s = 0.0 if at_once else period_s * random.uniform(EARLIEST_FIRST, 1.0)
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(rung.wait(), pause_s)
        rung.clear()
        pause_s = period_s
        try:
            await action()
        except Exception as error:  # logged; the next round runs
            rounds.failed(error)
        else:
            rounds.went_well()


async def once(name: str, action: Callable[[], Awaitable[object]]) -> None:
    """Run `action`, and log a failure. For a task whose result nobody awaits."""
    try:
        await action()
    except Exception as error:  # logged: nobody awaits the action
        if is_transient(error):
            logger.error("%s: the database cannot be used: %s", name, reason(error))
        else:
            logger.error("%s failed", name, exc_info=error)
