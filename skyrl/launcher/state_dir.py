"""The directories of one server: its state directory, which is locked, and a private one for sockets and secrets.

Knows files, locks and permissions. Does not know what is kept in the directories.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from skyrl.config.server import ConfigError

logger = logging.getLogger(__name__)

LONGEST_TMPDIR = 50
"""A socket's path has 107 characters at most, and vLLM names its own sockets by UUIDs."""


def lock_state_dir(state_dir: Path) -> IO[str]:
    """Lock the state directory: it is for one server. A new one is for this user alone, because it will hold prompts,
    weights and secrets. The lock is held while the returned file is open.

    Raises ConfigError when another server holds the lock, or the directory cannot be written to.
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
def private_directory(state_dir: Path) -> Iterator[Path]:
    """A directory for sockets and secrets that only this user may enter. `state_dir/run` is a link to it. Both are
    removed at exit.

    The directory is locked, so that programs that tidy temporary directories (systemd-tmpfiles) leave it alone while a
    server runs for weeks.
    """
    run = state_dir / "run"
    if run.is_symlink():
        _remove_unlocked(run.readlink())
        run.unlink()
    parent = None if len(tempfile.gettempdir()) <= LONGEST_TMPDIR else "/tmp"
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
    """Remove what a killed launcher left. A directory that is locked belongs to a running server: `state_dir` may be a
    copy of that server's state directory."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(descriptor)
