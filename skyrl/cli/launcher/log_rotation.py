"""Bounds the log files: a file that is too long is copied to `<file>.1` and emptied; older copies move on by one.

The processes append to their files and keep writing while that happens, as with logrotate's `copytruncate`. Lines that
are written between the copy and the emptying are lost: some milliseconds' worth.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_S = 10.0


async def rotate_logs(directory: Path, longest_bytes: int, kept: int) -> None:
    """Look at the files every LOOK_S until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await asyncio.to_thread(rotate_once, directory, longest_bytes, kept)
        except OSError as error:  # a full disk, or somebody has moved a file
            logger.warning("the logs in %s could not be rotated: %s", directory, error)


def rotate_once(directory: Path, longest_bytes: int, kept: int) -> None:
    """Rotate each `*.log` that is longer than `longest_bytes`, and keep `kept` copies of each."""
    for file in sorted(directory.glob("*.log")):
        if file.stat().st_size > longest_bytes:
            _rotate(file, kept)


def _rotate(file: Path, kept: int) -> None:
    for number in range(kept, 1, -1):
        older = _copy_of(file, number - 1)
        if older.exists():
            older.replace(_copy_of(file, number))
    if kept:
        shutil.copyfile(file, _copy_of(file, 1))
    os.truncate(file, 0)


def _copy_of(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.{number}")
