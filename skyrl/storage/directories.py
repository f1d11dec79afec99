"""Local directories that are either whole or not there: written under another name, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from skyrl.storage.base import MANIFEST, CheckpointStore

_SCRATCH = re.compile(r"\.tmp-[0-9a-f]{16}")
"""No checkpoint is called so, whatever its user names it: a store's key ends with the save's own id."""


def safe_name(name: str) -> str:
    """A file name for any id; nothing in it is a separator or has a meaning to the shell."""
    return quote(name, safe="").replace("%", "=")


def id_of(file_name: str) -> str:
    """The id that `safe_name` made this file name of."""
    return unquote(file_name.replace("=", "%"))


def is_scratch(path: Path) -> bool:
    """Whether a directory is being written or deleted, or was when its writer died."""
    return _SCRATCH.fullmatch(path.name) is not None


def scratch_in(parent: Path) -> Path:
    """A name of its own for a directory that is not whole."""
    return parent / f".tmp-{secrets.token_hex(8)}"


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory to fill; on success it becomes `target` (which must not exist), else it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_in(target.parent)
    scratch.mkdir()
    try:
        yield scratch
        for path in scratch.rglob("*"):
            _sync(path)
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


def sizes_of(directory: Path) -> dict[str, int]:
    """Bytes by file name, without a manifest."""
    return {file.name: file.stat().st_size for file in directory.iterdir() if file.name != MANIFEST}


def link_files(source: Path, target: Path) -> None:
    """Make all files of `source` but the manifest appear in `target`: as links, or as copies on another file system.

    Stored files never change, so sharing their bytes is safe; either directory may be deleted."""
    for file in source.iterdir():
        if file.name != MANIFEST:
            _link(file, target / file.name)


def link_tree(source: Path, target: Path) -> None:
    """As `link_files`, with folders and all that is in them. `target` exists, and is empty."""
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(file: str | Path, target: str | Path) -> None:
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def fetch(store: CheckpointStore, key: str, target: Path) -> None:
    """Bring what is stored to the local directory `target`, whole; whoever comes second finds it there."""
    with store.reading(key) as source:
        try:
            with atomic_directory(target) as scratch:
                link_files(source, scratch)
        except OSError:
            if not target.is_dir():
                raise


def remove(directory: Path) -> None:
    """Delete a directory if it is there. Renamed first, so that a partly deleted one never looks whole."""
    doomed = scratch_in(directory.parent)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed)
