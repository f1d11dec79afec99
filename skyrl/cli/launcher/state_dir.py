"""The directories of one server: its state directory, which is locked, a private one for sockets and secrets, and the
log files, which are bounded.

A log file that is too long is copied to `<file>.1` and emptied; older copies move on by one. The processes append to
their files and keep writing while that happens, as with logrotate's `copytruncate`. Lines that are written between the
copy and the emptying are lost: some milliseconds' worth.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from skyrl.base.config.server import ConfigError

logger = logging.getLogger(__name__)

LONGEST_TMPDIR = 50
"""If TMPDIR is longer, /tmp is used: a socket's path has at most 107 characters, and vLLM's sockets have UUIDs in their
names."""


def lock_state_dir(state_dir: Path) -> IO[str]:
    """Make the state directory if it is missing, and lock it for this server. A new one gets mode 0700, because it will
    hold prompts, weights and secrets. The lock is held while the returned file is open.

    Raises ConfigError when another server holds the lock, or when the directory cannot be written to.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"state-dir: cannot write to {state_dir} ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(f"state-dir: another skyrl server is running in {state_dir}") from error
    if state_dir.stat().st_mode & 0o077:
        logger.warning("other users may enter %s; unless that is meant: chmod 700 %s", state_dir, state_dir)
    return lock


@contextmanager
def private_directory(state_dir: Path, longest_tmpdir: int = LONGEST_TMPDIR) -> Iterator[Path]:
    """A directory for sockets and secrets that only this user may enter. `state_dir/run` is a link to it. Both are
    removed at exit. If TMPDIR has more characters than `longest_tmpdir`, the directory is in /tmp.

    The directory is locked, so that programs that clean temporary directories (systemd-tmpfiles) do not delete it
    while the server runs.
    """
    run = state_dir / "run"
    if run.is_symlink():
        _remove_unlocked(run.readlink())
        run.unlink()
    parent = None if len(tempfile.gettempdir()) <= longest_tmpdir else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="skyrl-", dir=parent))
    run.symlink_to(directory)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(descriptor)
        shutil.rmtree(directory, ignore_errors=True)
        run.unlink()


def _remove_unlocked(directory: Path) -> None:
    """Remove the private directory that a killed launcher has left. A locked directory stays: it belongs to a running
    server of which this state directory is a copy."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(descriptor)


LOG_LOOK_S = 10.0


async def rotate_logs(directory: Path, longest_bytes: int, kept: int) -> None:
    """Look at the files every LOOK_S until cancelled."""
    while True:
        await asyncio.sleep(LOG_LOOK_S)
        try:
            await asyncio.to_thread(rotate_once, directory, longest_bytes, kept)
        except OSError as error:  # the directory cannot be listed now, for example without a free file descriptor
            logger.warning("the logs in %s could not be rotated: %s", directory, error)


def rotate_once(directory: Path, longest_bytes: int, kept: int) -> None:
    """Rotate each `*.log` that is longer than `longest_bytes`, and keep `kept` copies of each. One that cannot be
    rotated is logged, and loses no older copy."""
    for file in sorted(directory.glob("*.log")):
        try:
            if file.stat().st_size > longest_bytes:
                _rotate(file, kept)
        except OSError as error:  # a full disk, or somebody has moved the file
            logger.warning("%s could not be rotated: %s", file, error)


def _rotate(file: Path, kept: int) -> None:
    if kept:
        newest = file.with_name(f"{file.name}.new")
        try:
            shutil.copyfile(file, newest)
        except OSError:
            newest.unlink(missing_ok=True)
            raise
        for number in range(kept, 1, -1):
            older = _copy_of(file, number - 1)
            if older.exists():
                older.replace(_copy_of(file, number))
        newest.replace(_copy_of(file, 1))
    os.truncate(file, 0)


def _copy_of(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.{number}")
