"""Free space on the server's disk: how much is kept, who is told when there is less, and which errors mean a full disk.

Knows a directory and the disk below it. Does not know what is written there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SPARE_DISK_BYTES = 512 * 2**20
"""What large bodies leave free: results, snapshots and the database need some, too."""
LOOK_S = 10.0
REPEAT_S = 600.0
"""How often the log says again that there is little space."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def shortage(directory: Path) -> str | None:
    """What to tell people while less than SPARE_DISK_BYTES are free, or nobody can say; None while there is enough."""
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
    """Whether an error, or one that it was raised from, says that no space is left. Libraries that are not written in
    Python say so in their text alone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if "No space left on device" in str(seen) or "Disk quota exceeded" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


async def watch_disk(directory: Path) -> None:
    """Log when there is little space, again every REPEAT_S while that lasts, and when there is enough again. Runs until
    it is cancelled; the first look is at once."""
    said_at: float | None = None
    while True:
        trouble = await asyncio.to_thread(shortage, directory)
        now = time.monotonic()
        if trouble is None and said_at is not None:
            logger.info("the server's disk has enough space again")
            said_at = None
        elif trouble is not None and (said_at is None or now - said_at >= REPEAT_S):
            logger.warning("%s (%s)", trouble, directory)
            said_at = now
        await asyncio.sleep(LOOK_S)
