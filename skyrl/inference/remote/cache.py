"""The saves on a node, adapters or versions of the full weights: each is fetched from the checkpoint store once, and
linked into a directory of each vLLM.

    <root>/stored/<save>/              a save's files, as they came from the store
    <root>/replicas/<replica>/<save>/  hard links to them, for one start of one vLLM
    <root>/replicas/<replica>.lock     locked for as long as that vLLM, or its sidecar, runs
    <root>/locks/<save>                locked while files of this save are fetched, linked or deleted
    <root>/boot                        which boot of the machine wrote `stored`

Nothing is synced: that takes longer than the rest, and a store has the files. So after another boot, which may have
followed a loss of power, `stored` is deleted.

vLLM reads an evicted adapter's files again, and dies if they are gone. So each vLLM reads its own links: whatever is
deleted in the store, in `stored` or for another vLLM, its files stay. All methods of `NodeCache` block; they may be
called from several threads, and several processes may share a root.

`NodeFiles` is the cache for one event loop: all who ask for a save at once wait for one download, and no call keeps the
process from ending. `Daemons` runs calls that may hang for minutes, on threads that do not keep a process from ending.
The threads of `concurrent.futures` are waited for when the interpreter ends: a vLLM whose engine has died would then
not exit while its checkpoint store hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from skyrl.storage.checkpoint_store.base import CheckpointStore, NotStored, StoreError
from skyrl.storage.checkpoint_store.directories import (
    fetch,
    is_scratch,
    link_files,
    old_scratch,
    remove,
    scratch_in,
    sizes_of,
    subdirectories,
)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
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
            self._check_boot()
        for directory in (self._stored, self._root / SCRATCH):
            for incomplete in old_scratch(directory, time.time() - DOWNLOAD_S):
                remove(incomplete)
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

    def scratch(self, size_bytes: int) -> Path:
        """An empty directory for the files of a save, for `add`. Raises OSError."""
        self._remove_unused(size_bytes)
        scratch = scratch_in(self._stored)
        scratch.mkdir()
        return scratch

    def add(self, key: str, scratch: Path) -> None:
        """The files of a key are in `scratch`, which then is gone. Those that the node has already stay. Raises
        OSError."""
        name = _name_of(key)
        with self._locked(name):
            if (self._stored / name).is_dir():
                remove(scratch)
            else:
                scratch.rename(self._stored / name)

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
        fetch(self._store, key, self._stored / name, synced=False)
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
        try:
            scratch.mkdir()
            link_files(stored, scratch)
            scratch.rename(own)
        except OSError:  # a full disk
            remove(scratch)
            raise
        return own

    def _is_linked(self, name: str) -> bool:
        return any((replica / name).is_dir() for replica in subdirectories(self._replicas))

    def _remove_unused(self, wanted_bytes: int = 0) -> None:
        """Delete saves that no vLLM has loaded: those that were not used for `keep_s`, and as many others as there are
        too many bytes, the least recently used first."""
        complete = [path for path in subdirectories(self._stored) if not is_scratch(path)]
        found, sizes = list[tuple[float, Path]](), dict[Path, int]()
        for path in complete:
            with contextlib.suppress(FileNotFoundError):  # another fetch has deleted it
                sizes[path] = sum(sizes_of(path).values())
                found.append((path.stat().st_mtime, path))
        found.sort()
        too_many = sum(sizes.values()) + wanted_bytes - self._max_bytes
        for used_at, path in found:
            if too_many <= 0 and used_at >= time.time() - self._keep_s:
                return
            if self._forget_unlinked(path.name):
                too_many -= sizes[path]

    def _check_boot(self) -> None:
        """Delete the saves that another boot wrote; where the system does not tell its boots apart, those of any
        start before, but for what a vLLM that runs has."""
        file, boot = self._root / "boot", secrets.token_hex(8)
        with contextlib.suppress(OSError):
            boot = _BOOT_ID.read_text()
        if not file.exists() or file.read_text() != boot:
            for path in subdirectories(self._stored):
                if not is_scratch(path):
                    self._forget_unlinked(path.name)
            file.write_text(boot)

    def _forget_unlinked(self, name: str) -> bool:
        """Delete a save unless a vLLM has it, or somebody changes its files now. Whether it is deleted."""
        with self._locked(name, wait=False) as is_locked:
            if unlinked := is_locked and not self._is_linked(name):
                self._forget(name)
        return unlinked

    def _forget(self, name: str) -> None:
        remove(self._stored / name)
        (self._locks / name).unlink(missing_ok=True)

    def _remove_ended(self) -> None:
        """Delete the directories of vLLMs that have ended: nobody holds their locks. What they had loaded counts as
        just used, for their next starts."""
        for file in self._replicas.glob("*.lock"):
            if file.stem != self._own.name and (lock := _lock_file(file, wait=False)) is not None:
                for path in subdirectories(file.with_suffix("")):
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


T = TypeVar("T")


class Daemons:
    """At most `at_once` calls run; others wait for their turn, in order."""

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, or its exception. If the caller is cancelled, the call goes on, and keeps its turn. Raises
        OSError if no thread can be started."""
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end(result: T | None, error: BaseException | None) -> None:
            self._turns.release()
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # pyright: ignore[reportArgumentType]

        def body() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(end, result, error)

        try:
            threading.Thread(target=body, daemon=True).start()
        except RuntimeError as error:
            self._turns.release()
            raise OSError(errno.EAGAIN, str(error)) from error
        return await future


logger = logging.getLogger(__name__)

FETCHES_AT_ONCE, LINKS_AT_ONCE = 8, 4
COMING_S = 60.0
"""How long a request waits for a message with its files; then it asks the store. The engine's host may be gone."""


class NodeFiles:
    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._fetches, self._links = Daemons(FETCHES_AT_ONCE), Daemons(LINKS_AT_ONCE)
        self._adds = Daemons(LINKS_AT_ONCE)
        """Apart: one may wait for a fetch of its key, and the links of other keys must not."""
        self._opening: asyncio.Task[OSError | None] | None = None
        self.bringing: dict[str, asyncio.Task[Path]] = {}
        """By key, the fetch that all who ask for it wait for."""
        self.releasing: dict[str, asyncio.Task[None]] = {}
        """By key, the task that deletes this vLLM's files."""
        self._coming: dict[str, asyncio.Future[None]] = {}
        """By key, what ends with the block of `adding`."""

    def open(self) -> None:
        """Begin to open the cache, also when it was open: somebody may have deleted it."""
        self._opening = asyncio.create_task(self._open())

    async def bring(self, key: str) -> Path:
        """This vLLM's directory of a save. All requests for the same save wait for one fetch, which goes on if a client
        gives up. Raises StoreError, NotStored and OSError."""
        task = self.bringing.get(key)
        if task is None:
            task = self.bringing[key] = asyncio.create_task(self._cached_or_fetched(key))
            task.add_done_callback(lambda ended: self._brought(key, ended))
        return await asyncio.shield(task)

    @contextlib.asynccontextmanager
    async def adding(self, key: str, size_bytes: int) -> AsyncIterator[Path]:
        """An empty directory for the files of a save, which are there for all vLLMs of the node when the block ends.
        Requests for the save meanwhile wait for that; they ask the store if the block fails. Raises OSError."""
        coming = self._coming[key] = asyncio.get_running_loop().create_future()
        scratch = None
        try:
            await self._opened()
            scratch = await self._adds.run(lambda: self._cache.scratch(size_bytes))
            yield scratch
            await self._adds.run(lambda: self._cache.add(key, scratch))
        except BaseException as error:
            if isinstance(error, OSError):
                self._opening = None  # as in `_brought`
            if scratch is not None:
                with contextlib.suppress(OSError):  # a later start deletes it
                    remove(scratch)
            raise
        finally:
            if self._coming.get(key) is coming:
                del self._coming[key]
            coming.set_result(None)

    def release(self, key: str) -> None:
        """Begin to delete this vLLM's files of a key. A failure is logged."""
        if key not in self.releasing:
            task = self.releasing[key] = asyncio.create_task(self._release(key))
            task.add_done_callback(lambda _: self.releasing.pop(key))

    def _brought(self, key: str, task: asyncio.Task[Path]) -> None:
        del self.bringing[key]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError | StoreError) and not isinstance(error, NotStored):
            self._opening = None  # the cache is opened anew: somebody may have deleted it

    async def _cached_or_fetched(self, key: str) -> Path:
        if (release := self.releasing.get(key)) is not None:
            await asyncio.wait([release])
        if (coming := self._coming.get(key)) is not None:
            await asyncio.wait([coming], timeout=COMING_S)
        await self._opened()
        directory = await self._links.run(lambda: self._cache.cached(key))
        return directory or await self._fetches.run(lambda: self._cache.fetch(key))

    async def _opened(self) -> None:
        """Return when the cache is open. Raises OSError if it cannot be opened; the next call tries again."""
        if self._opening is None or (self._opening.done() and self._opening.result() is not None):
            self.open()
        assert self._opening is not None
        if (error := await asyncio.shield(self._opening)) is not None:
            raise error

    async def _open(self) -> OSError | None:
        try:
            await self._links.run(self._cache.open)
        except OSError as error:
            logger.warning("the node's directory for weights cannot be used: %s", error)
            return error
        return None

    async def _release(self, key: str) -> None:
        try:
            await self._links.run(lambda: self._cache.release(key))
        except OSError as error:
            logger.warning("the files of %s could not be deleted from this node: %s", key, error)
