"""The memory and the disk of the host that new work can have.

Memory: what the kernel has left, within the limits of this process's cgroups. Disk: how much is kept free, a log line
when there is less, and which errors mean that the disk is full.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_FILES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
}
"""Of cgroups of version 2 and 1, by the controllers in /proc/self/cgroup: where they are mounted, the files with the
limit and with what is used, and a line of memory.stat."""


def trim() -> None:
    """Give back to the kernel what this process has freed. After an RL step of 64 sequences on Qwen2.5-0.5B the trainer
    kept 2.3 GB. The next work takes them again: 0.2 s of a CPU for each GB. Without glibc nothing happens."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def free_host_bytes(root: Path = Path("/")) -> float:
    """What the kernel says is available to new work, and at most what the limits of this process's cgroups leave."""
    free = _number((root / "proc/meminfo").read_text(), "MemAvailable:") * 1024.0
    return max(0.0, min([free, *_left_by_cgroups(root)]))


def host_bytes(root: Path = Path("/")) -> float:
    """What this process and its children could have at most: all memory of the host with its swap space."""
    meminfo = (root / "proc/meminfo").read_text()
    swap = _number(meminfo, "SwapTotal:") if "SwapTotal:" in meminfo else 0
    return 1024.0 * (_number(meminfo, "MemTotal:") + swap)


def limit_bytes(root: Path = Path("/")) -> float:
    """What this process may use at most, whatever others use now: the host's memory without swap space, within the
    limits of this process's cgroups. Raises FileNotFoundError on a system without /proc."""
    total = 1024.0 * _number((root / "proc/meminfo").read_text(), "MemTotal:")
    return min([total, *_limits_of_cgroups(root)])


def _limits_of_cgroups(root: Path) -> Iterator[float]:
    """The limits of this process's cgroup, and of each cgroup above it."""
    for mount, path, limit_file, _, _ in _cgroups(root):
        for group in (path, *path.parents):
            try:
                limit = (root / mount / group.relative_to("/") / limit_file).read_text().strip()
            except OSError:
                continue
            if limit != "max":
                yield int(limit)


def _left_by_cgroups(root: Path) -> Iterator[float]:
    """What is left of the limit of this process's cgroup, and of each cgroup above it. Inactive pages of files count as
    left, because the kernel takes them back."""
    for mount, path, limit_file, used_file, files in _cgroups(root):
        for group in (path, *path.parents):
            directory = root / mount / group.relative_to("/")
            try:
                limit, used = ((directory / name).read_text().strip() for name in (limit_file, used_file))
                if limit != "max":
                    yield int(limit) - int(used) + _number((directory / "memory.stat").read_text(), files)
            except OSError:  # has no limits, as the highest one, or cannot be seen from this container
                pass


def _cgroups(root: Path) -> Iterator[tuple[str, Path, str, str, str]]:
    """Where the memory of this process is counted: the mount, the path below it, and the names of `_FILES`."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without cgroups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in _FILES:
            mount, limit, used, files = _FILES[controllers]
            yield mount, Path("/" if ".." in Path(path).parts else path), limit, used, files


def _number(text: str, start: str) -> int:
    return next(int(line.removeprefix(start).split()[0]) for line in text.splitlines() if line.startswith(start))


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
