"""The directories of one server: its state directory, which is locked, and a private one for sockets and secrets."""

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
