"""The saves on a node, adapters or versions of the full weights: each is fetched from the checkpoint store once, and
linked into a directory of each vLLM.

    <root>/stored/<save>/              a save's files, as they came from the store
    <root>/replicas/<replica>/<save>/  hard links to them, for one start of one vLLM
    <root>/replicas/<replica>.lock     locked for as long as that vLLM, or its sidecar, runs
    <root>/locks/<save>                locked while files of this save are fetched, linked or deleted

vLLM reads an evicted adapter's files again, and dies if they are gone. So each vLLM reads its own links: whatever is
deleted in the store, in `stored` or for another vLLM, its files stay. All methods block; they may be called from
several threads, and several processes may share a root.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from skyrl.storage.checkpoint_store.base import CheckpointStore, NotStored
from skyrl.storage.checkpoint_store.directories import fetch, is_scratch, link_files, remove, scratch_in, sizes_of

_REPLICAS = "replicas"
"""The lock of the list of replicas."""
SCRATCH = "scratch"
"""The directory in the root for downloads."""
DOWNLOAD_S = 3600.0
"""An incomplete directory that is older belongs to a vLLM that has died."""
KEEP_S = 900.0
"""How long a save stays that no vLLM has loaded: one that is started again loads what it had again."""


class NodeCache:
    """One start of one vLLM as a user of the root. `max_bytes` bounds `stored`; only what running vLLMs have loaded may
    take more. `is_whole` tells from the names of a save's files whether they are what vLLM loads."""

    def __init__(
        self,
        store: CheckpointStore,
        root: Path,
        max_bytes: int,
        is_whole: Callable[[Collection[str]], bool],
        keep_s: float = KEEP_S,
    ) -> None:
        self._store = store
        self._is_whole = is_whole
        self._root = root
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._stored, self._replicas, self._locks = root / "stored", root / "replicas", root / "locks"
        self._own = self._replicas / secrets.token_hex(8)
        self._lock: int | None = None

    def open(self) -> None:
        """Make this vLLM's directory, and delete those of vLLMs that have ended. May be called again when the root was
        deleted. Raises OSError, among others
        PermissionError for a root that is another user's."""
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        if self._root.lstat().st_uid != os.geteuid():
            raise PermissionError(f"{self._root} is another user's")
        for directory in (self._stored, self._replicas, self._locks):
            directory.mkdir(exist_ok=True)
        with self._locked(_REPLICAS):
            own_lock = self._own.with_suffix(".lock")
            if not own_lock.exists():
                self.close()  # if the root was deleted, the lock is that of a deleted file
                self._lock = _lock_file(own_lock, wait=False)
            self._own.mkdir(exist_ok=True)
            self._remove_ended()
        for directory in (self._stored, self._root / SCRATCH):
            _remove_incomplete(directory)
        self._remove_unused()

    def close(self) -> None:
        """Count this vLLM as ended."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def cached(self, key: str) -> Path | None:
        """This vLLM's directory with the files of a key, if the node has them."""
        name = _name_of(key)
        with self._locked(name):
            return self._linked(name)

    def fetch(self, key: str) -> Path:
        """This vLLM's directory with the files of a key, which come from the store if the node does not have them.

        Raises NotStored if the store has nothing to load under this key, StoreError, and OSError (a full disk)."""
        name = _name_of(key)
        with self._locked(name):
            if (directory := self._linked(name)) is not None:
                return directory
            try:
                return self._fetched(key, name)
            except Exception:
                self._forget(name)
                raise

    def release(self, key: str) -> None:
        """This vLLM will not read the files of a key again. They leave the node with the last vLLM that has them."""
        name = _name_of(key)
        with self._locked(name):
            remove(self._own / name)
            if not self._is_linked(name):
                self._forget(name)

    def _fetched(self, key: str, name: str) -> Path:
        sizes = self._store.files(key)
        if not self._is_whole(sizes.keys()):
            raise NotStored(f"{key} holds other files than vLLM loads")
        self._remove_unused(sum(sizes.values()))
        fetch(self._store, key, self._stored / name)
        directory = self._linked(name)
        assert directory is not None
        return directory

    def _linked(self, name: str) -> Path | None:
        own, stored = self._own / name, self._stored / name
        if own.is_dir():
            return own
        if not stored.is_dir():
            return None
        os.utime(stored)  # when it was last used
        scratch = scratch_in(self._own)
        scratch.mkdir()
        link_files(stored, scratch)
        scratch.rename(own)
        return own

    def _is_linked(self, name: str) -> bool:
        return any((replica / name).is_dir() for replica in _directories(self._replicas))

    def _remove_unused(self, wanted_bytes: int = 0) -> None:
        """Delete saves that no vLLM has loaded: those that were not used for `keep_s`, and as many others as there are
        too many bytes, the least recently used first."""
        complete = [path for path in _directories(self._stored) if not is_scratch(path)]
        found = sorted((path.stat().st_mtime, path) for path in complete)
        sizes = {path: sum(sizes_of(path).values()) for _, path in found}
        too_many = sum(sizes.values()) + wanted_bytes - self._max_bytes
        for used_at, path in found:
            if too_many <= 0 and used_at >= time.time() - self._keep_s:
                return
            with self._locked(path.name, wait=False) as is_locked:
                if is_locked and not self._is_linked(path.name):
                    self._forget(path.name)
                    too_many -= sizes[path]

    def _forget(self, name: str) -> None:
        remove(self._stored / name)
        (self._locks / name).unlink(missing_ok=True)

    def _remove_ended(self) -> None:
        """Delete the directories of vLLMs that have ended: nobody holds their locks. What they had loaded counts as
        just used, for their next starts."""
        for file in self._replicas.glob("*.lock"):
            if file.stem != self._own.name and (lock := _lock_file(file, wait=False)) is not None:
                for path in _directories(file.with_suffix("")):
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(self._stored / path.name)
                remove(file.with_suffix(""))
                file.unlink()
                os.close(lock)

    @contextlib.contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Whether this block alone changes the files of a save. Without `wait`, False if another one does."""
        lock = _lock_file(self._locks / name, wait=wait)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)


def _name_of(key: str) -> str:
    """A file name for a key. Keys may be too long."""
    return f"{key.rpartition('/')[2][:60]}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _lock_file(path: Path, *, wait: bool) -> int | None:
    """The descriptor of a file that is locked until the descriptor is closed, also by the end of the process."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
                return lock  # else the file was deleted meanwhile, and others lock a new one
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:
            pass
        os.close(lock)


def _remove_incomplete(parent: Path) -> None:
    for path in _directories(parent):
        with contextlib.suppress(FileNotFoundError):  # it is complete, or deleted, by now
            if is_scratch(path) and path.stat().st_mtime < time.time() - DOWNLOAD_S:
                remove(path)


def _directories(parent: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [path for path in parent.iterdir() if path.is_dir()]
    return []
