"""Free space on the server's disk: how much is kept free, a log line when there is less, and which errors mean that the
disk is full."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SPARE_DISK_BYTES = 512 * 2**20
"""Large request bodies are refused while less than this is free, because results, snapshots and the database need
space, too."""
LOOK_S = 10.0
"""How often `watch_disk` looks."""
REPEAT_S = 600.0
"""How often the log repeats that there is little space."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def shortage(directory: Path) -> str | None:
    """A message if less than SPARE_DISK_BYTES are free or the free space cannot be read; None if there is enough."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"the free space of the server's disk cannot be read: {error.strerror}"
    if free >= SPARE_DISK_BYTES:
        return None
    return (
        f"the server's disk has {free / 2**20:.0f} MiB free, less than the {SPARE_DISK_BYTES / 2**20:.0f} MiB that it "
        "keeps: training passes above 64 KiB are refused until there is more"
    )


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or an error from which it was raised, says that no space is left. Errors of libraries that are
    not written in Python say so only in their text."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in _FULL:
            return True
        if "No space left on device" in str(link) or "Disk quota exceeded" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return False


async def watch_disk(directory: Path) -> None:
    """Log when there is little space, again every REPEAT_S while that lasts, and when there is enough again. Runs until
    it is cancelled."""
    logged_at: float | None = None
    while True:
        message = await asyncio.to_thread(shortage, directory)
        now = time.monotonic()
        if message is None and logged_at is not None:
            logger.info("the server's disk has enough space again")
            logged_at = None
        elif message is not None and (logged_at is None or now - logged_at >= REPEAT_S):
            logger.warning("%s (%s)", message, directory)
            logged_at = now
        await asyncio.sleep(LOOK_S)
