"""Versions of adapters that are in memory until their files are on the disk.

The files of a held version are in a tmpfs, which outlives every process. The version's directory below the state
directory has a symbolic link for each file, at the path where the file will be: whoever reads the version sees no
difference, and its path never changes. Once the files are on the disk, each takes the place of its link, and the
memory is free again. Where replicas are on other nodes, the checkpoint store takes the place of the disk, and the
directory goes with the memory. A process that dies loses nothing: the engine's next start finds the memory and copies
it. A loss of power leaves links that lead nowhere, or no directory at all. So does the end of a container that has a
tmpfs of its own.

Knows directories and bytes. Knows no rows, and does not decide which versions may be held.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from skyrl.storage.checkpoint_store.base import CheckpointStore, StoreError
from skyrl.storage.checkpoint_store.directories import make_scratch, remove, remove_empty, sizes_of, store_once, sync
from skyrl.storage.checkpoint_store.versions import version_in, version_key

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MOST_BYTES = 2**30
"""Of all versions that a process holds at a time."""
PART_OF_FREE = 4
"""All held versions take at most one part in so many of what is free in the tmpfs."""
LEFT_S = 86_400.0
AWAY_S = 5.0
"""A store that has failed only after so long is away, and does not just refuse one version."""
_OWNER = "state-dir"
"""The file in the memory's directory that has the path of the state directory, and what is there. No link: nothing that
walks through the memory must come to the state directory."""


ON_ITS_WAY_S = 10.0
"""How long a host that sees the state directory, and not the memory, waits for a version's files."""


def room_in(tmpfs: Path) -> int:
    """The bytes that all held versions may take there together. Raises OSError."""
    space = os.statvfs(tmpfs)
    return min(MOST_BYTES, space.f_bavail * space.f_frsize // PART_OF_FREE)


class NotHere(OSError):
    """A version is in the memory of another host, and will soon be on the disk."""


def leads_nowhere(directory: Path) -> bool:
    """Whether a version's directory has links to memory that is gone. Raises NotHere while the memory may be another
    host's, and OSError."""
    with os.scandir(directory) as entries:
        gone = any(entry.is_symlink() and not os.path.exists(entry.path) for entry in entries)
    if gone and directory.stat().st_mtime > time.time() - ON_ITS_WAY_S:
        raise NotHere(f"{directory} is not on the disk yet")
    return gone


class HeldVersions:
    """Safe for threads. Without a tmpfs nothing is held. Two engines of a server have two roles, so that each has its
    own part of the memory. `store`: versions go there, and not to the disk."""

    def __init__(
        self,
        state_dir: Path,
        role: str = "",
        tmpfs: Path | None = SHARED_MEMORY,
        store: CheckpointStore | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._store = store
        self._tmpfs = tmpfs if tmpfs is not None and tmpfs.is_dir() else None
        self._owner = _owner_at(state_dir.resolve())
        name = hashlib.sha256(f"{self._owner}:{role}".encode()).hexdigest()[:16]
        self._memory = (tmpfs or SHARED_MEMORY) / f"{_prefix()}{name}"
        self._lock = threading.Lock()
        self._bytes: dict[Path, int] = {}
        """Of versions that are being written or are held, by directory."""
        self._busy: set[Path] = set()
        """Versions that a thread writes or copies."""
        self._failed: set[Path] = set()
        """Versions whose copy has failed. Until it succeeds no other one is held: its save tells the client."""

    def write(self, directory: Path, most_bytes: int, write: Callable[[Path], None]) -> dict[str, int] | None:
        """Have `write` put the files of a version, at most `most_bytes`, into memory, and link them into `directory`,
        which must not exist. Returns the files' sizes by name. None if the version cannot be held: the caller writes
        it to the disk. Call `copy` after that."""
        held = self._held(directory)
        if not self._take(directory, held, most_bytes):
            return None
        try:
            write(held)
            scratch = make_scratch(directory.parent)
            try:
                for file in held.iterdir():
                    (scratch / file.name).symlink_to(file)
                scratch.rename(directory)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            return sizes_of(held)
        except Exception as error:  # the save to the disk will say what is wrong with the save itself
            logger.warning("%s is not held in memory: %s", directory, error)
            self._free(directory)
            return None
        finally:
            self._busy.discard(directory)

    def copy(self, directory: Path) -> None:
        """Put the files of a held version on the disk, synced, in the place of their links, or into the store, and free
        the memory. Nothing to do for a version that was deleted. Raises OSError and StoreError; then the version is
        still held."""
        with self._lock:
            if directory in self._busy:
                return
            self._busy.add(directory)
        try:
            try:
                if self._store is None:
                    _put_on_disk(directory)
                else:
                    _put_into(self._store, directory)
            except FileNotFoundError:
                if directory.exists():
                    raise
            self._free(directory)
            self._failed.discard(directory)
        except BaseException:
            self._failed.add(directory)
            raise
        finally:
            self._busy.discard(directory)

    def copy_all(self) -> None:
        """Copy what is in memory and no thread copies, also what an engine that has died has left. Also free the memory
        of state directories that are gone for LEFT_S. A failure is logged; the version stays in memory."""
        if self._tmpfs is None:
            return
        for memory in self._tmpfs.glob(f"{_prefix()}*"):
            with contextlib.suppress(OSError):  # its server has freed it meanwhile
                if _is_left(memory):
                    shutil.rmtree(memory, ignore_errors=True)
        for held in sorted(self._memory.glob("adapters/*/*")) if _is_own(self._memory) else ():
            began = time.monotonic()
            try:
                self.copy(self._state_dir / held.relative_to(self._memory))
            except (OSError, StoreError) as error:
                logger.warning("%s is in memory alone: it could not be copied: %s", held, error)
                if time.monotonic() - began > AWAY_S:
                    break  # the others would wait for the store as long
        for failed in [*self._failed]:
            if not self._held(failed).is_dir():
                self._failed.discard(failed)

    def _take(self, directory: Path, held: Path, most_bytes: int) -> bool:
        """Make the directory in memory for a version. Whether there is room."""
        if self._tmpfs is None:
            return False
        with self._lock:
            try:
                if self._failed or sum(self._bytes.values()) + most_bytes > room_in(self._tmpfs):
                    return False
                self._memory.mkdir(mode=0o700, exist_ok=True)
                if not _is_own(self._memory):
                    raise PermissionError(f"{self._memory} is not this user's alone")
                if not (self._memory / _OWNER).exists():
                    (self._memory / _OWNER).write_text(self._owner)
                held.mkdir(parents=True)
            except OSError as error:
                logger.warning("versions are not held in memory: %s", error)
                return False
            self._bytes[directory] = most_bytes
            self._busy.add(directory)
        return True

    def _held(self, directory: Path) -> Path:
        return self._memory / directory.relative_to(self._state_dir)

    def _free(self, directory: Path) -> None:
        held = self._held(directory)
        shutil.rmtree(held, ignore_errors=True)
        with self._lock:
            self._bytes.pop(directory, None)
            remove_empty(held.parent)
            remove_empty(held.parent.parent)
            if not held.parent.parent.exists():
                (self._memory / _OWNER).unlink(missing_ok=True)
                remove_empty(self._memory)


def _put_on_disk(directory: Path) -> None:
    """Replace a directory's links by the files that they lead to, synced. Raises OSError, FileNotFoundError if the
    directory is deleted meanwhile."""
    links = [path for path in directory.iterdir() if path.is_symlink()]
    if links:
        scratch = make_scratch(directory.parent)
        try:
            for link in links:
                shutil.copyfile(link, scratch / link.name)
                sync(scratch / link.name)
            for link in links:
                (scratch / link.name).rename(link)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    sync(directory)  # also if a process that died has replaced the last link
    sync(directory.parent)


def _put_into(store: CheckpointStore, directory: Path) -> None:
    """Store a version's files unless they are stored, and delete its directory. Raises OSError and StoreError,
    FileNotFoundError if the directory is deleted meanwhile."""
    version = version_in(directory)
    assert version is not None
    store_once(store, version_key(version), directory)
    remove(directory)
    remove_empty(directory.parent)
    remove_empty(directory.parent.parent)


def _owner_at(path: Path) -> str:
    """The path of a state directory, and which directory it is: containers with one tmpfs may each have another one at
    the same path."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return str(path)
    return f"{path}\n{found.st_dev}:{found.st_ino}"


def _is_left(memory: Path) -> bool:
    """Whether this user's memory belongs to a state directory that is not at its path, and has not changed for so long
    that its disk is not just away, and no server in another container uses it. Raises OSError."""
    if not _is_own(memory):
        return False
    owner = (memory / _OWNER).read_text()
    path = Path(owner.partition("\n")[0])
    if path.is_dir() and _owner_at(path) == owner:
        return False
    return max(each.lstat().st_mtime for each in (memory, *memory.rglob("*"))) < time.time() - LEFT_S


def _prefix() -> str:
    return f"skyrl-{os.getuid()}-"


def _is_own(memory: Path) -> bool:
    """Whether this user alone may read and write the directory: every user can make names in a tmpfs."""
    try:
        found = memory.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
