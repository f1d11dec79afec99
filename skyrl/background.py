"""Work that repeats for as long as a process lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


async def repeat(name: str, period_s: float, action: Callable[[], Awaitable[object]]) -> None:
    """Run `action` every `period_s` seconds until cancelled. A round that fails is logged, and the next one comes."""
    while True:
        await asyncio.sleep(period_s)
        try:
            await action()
        except Exception:
            logger.exception("%s failed; it is tried again in %g s", name, period_s)
