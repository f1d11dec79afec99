"""Work that a process repeats every few seconds: rounds that fail are logged, one line when the database goes away, and
one when it is back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from skyrl.runtime.processes.supervision import set_within
from skyrl.storage.db.faults import is_transient, reason

logger = logging.getLogger(__name__)

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
        await set_within(rung, pause_s)
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
