"""Local directories that are complete or do not exist: they are written under another name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from skyrl.storage.checkpoint_store.base import MANIFEST, CheckpointStore, NotStored

_SCRATCH = re.compile(r"\.tmp-[0-9a-f]{16}")
"""No checkpoint's directory can have such a name, because a store key ends with the id of the save."""


def safe_name(name: str) -> str:
    """A file name for any id: percent-encoded, with `=` for `%`, so that it contains no separator."""
    return quote(name, safe="").replace("%", "=")


def id_of(file_name: str) -> str:
    """The reverse of `safe_name`."""
    return unquote(file_name.replace("=", "%"))


def is_scratch(path: Path) -> bool:
    """Whether this is the name of a directory that is incomplete: it is being written or deleted, or the process that
    did so has died."""
    return _SCRATCH.fullmatch(path.name) is not None


def subdirectories(parent: Path) -> list[Path]:
    """Sorted by name; empty if `parent` is no directory. Makes one scan and no call per directory."""
    try:
        with os.scandir(parent) as entries:
            return [parent / name for name in sorted(entry.name for entry in entries if entry.is_dir())]
    except (FileNotFoundError, NotADirectoryError):
        return []


def old_scratch(parent: Path, before: float) -> list[Path]:
    """The incomplete directories in `parent` that were last changed before `before` (seconds since the epoch)."""
    try:
        with os.scandir(parent) as entries:
            paths = [parent / entry.name for entry in entries if entry.name.startswith(".tmp-")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if is_scratch(path) and path.is_dir() and path.stat().st_mtime < before:
                found.append(path)
    return found


def scratch_in(parent: Path) -> Path:
    """A new name for an incomplete directory."""
    return parent / f".tmp-{secrets.token_hex(8)}"


def remove_empty(directory: Path) -> None:
    """Delete a directory that contains nothing."""
    with contextlib.suppress(OSError):
        directory.rmdir()


@contextlib.contextmanager
def atomic_directory(target: Path, *, synced: bool = True) -> Iterator[Path]:
    """Yields an empty directory to fill. After the block it is synced and renamed to `target`, which must not exist. If
    anything fails, it is removed. Without `synced` a loss of power may leave files without their bytes."""
    scratch = make_scratch(target.parent)
    try:
        yield scratch
        for path in scratch.rglob("*") if synced else ():
            sync(path)
        os.utime(scratch)  # so that its age does not include the time to write the files
        if synced:
            sync(scratch)
        scratch.rename(target)
        if synced:
            sync(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def make_scratch(parent: Path) -> Path:
    """A new, incomplete directory in `parent`, which is made if it does not exist."""
    scratch = scratch_in(parent)
    try:
        _make(scratch)
    except (FileNotFoundError, FileExistsError):  # a sweep has deleted the parent, which was empty
        _make(scratch)
    return scratch


def _make(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir()


def sync(path: Path) -> None:
    """Bring a file's bytes, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sizes_of(directory: Path) -> dict[str, int]:
    """Bytes by file name, without a manifest."""
    return {file.name: file.stat().st_size for file in directory.iterdir() if file.name != MANIFEST}


def link_files(source: Path, target: Path) -> None:
    """Link all files of `source` except the manifest into `target`, or copy them if `target` is on another file system.

    Links are safe because stored files never change. Either directory may be deleted."""
    for file in source.iterdir():
        if file.name != MANIFEST:
            _link(file, target / file.name)


def link_tree(source: Path, target: Path) -> None:
    """Link or copy all files of `source` and of its sub-directories into `target`, an existing, empty directory."""
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(file: str | Path, target: str | Path) -> None:
    try:
        os.link(os.path.realpath(file), target)  # not a link to memory (`held`) itself
    except OSError:
        shutil.copyfile(file, target)


def fetch(store: CheckpointStore, key: str, target: Path, *, synced: bool = True) -> None:
    """Bring the stored files of a key to the local directory `target`. Does nothing if another caller was faster.
    `synced` as for `atomic_directory`."""
    with store.reading(key) as source:
        try:
            with atomic_directory(target, synced=synced) as scratch:
                link_files(source, scratch)
        except OSError:
            if not target.is_dir():
                raise


def store_once(store: CheckpointStore, key: str, directory: Path) -> None:
    """Store the files of a directory unless the key is stored. Raises OSError and StoreError."""
    try:
        store.files(key)
    except NotStored:
        with store.writing(key) as scratch:
            link_files(directory, scratch)


def remove(directory: Path) -> None:
    """Delete a directory if it exists. It is renamed first, so that a partly deleted directory never looks complete."""
    scratch = scratch_in(directory.parent)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(scratch)
        shutil.rmtree(scratch)
