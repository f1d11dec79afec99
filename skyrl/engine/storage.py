"""Directories that are either whole or not there: written under another name, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote


def safe_name(name: str) -> str:
    """A file name for any id; nothing in it is a separator or has a meaning to the shell."""
    return quote(name, safe="").replace("%", "=")


def id_of(file_name: str) -> str:
    """The id that `safe_name` made this file name of."""
    return unquote(file_name.replace("=", "%"))


def is_scratch(path: Path) -> bool:
    """Whether a directory is being written or deleted, or was when an engine died."""
    return path.name.startswith(".tmp-")


def _scratch_name() -> str:
    return f".tmp-{secrets.token_hex(8)}"


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory to fill; on success it becomes `target` (which must not exist), else it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / _scratch_name()
    scratch.mkdir()
    try:
        yield scratch
        for file in scratch.iterdir():
            _sync(file)
        os.utime(scratch)  # its age counts from now on, however long the files took
        _sync(scratch)
        scratch.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_of(directory: Path) -> int:
    """Bytes of all files in it."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def remove(directory: Path) -> None:
    """Delete a directory if it is there. Renamed first, so that a partly deleted one never looks whole."""
    doomed = directory.parent / _scratch_name()
    with contextlib.suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed)
