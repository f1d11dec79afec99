"""The interface of a checkpoint store. A store has directories of files under store keys. Each directory is complete or
does not exist.

A program calls a store on the threads of `in_store`: a store that hangs then blocks no thread that other work needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

MANIFEST = "checkpoint_complete"
OWNER = "skyrl-owner"


def any_group(_: str) -> bool:
    """All groups of keys."""
    return True


CountBytes = Callable[[str, int], object]
"""Called with "written" or "read" and a number of bytes, for files that go to a store or come from it. Copies within
the store and downloads by signed URLs are not counted."""


def not_counted(direction: str, size: int) -> None:
    """For a store without metrics."""


class StoreError(RuntimeError):
    """The store cannot be used: it is away, full, or refuses. The message contains the store's own message."""


class NotStored(StoreError):
    """Nothing is stored under this key, or there is no such file under it."""


@dataclass(frozen=True)
class StoredKey:
    """A complete directory, and the time when it was stored (seconds since the epoch)."""

    key: str
    stored_at: float


class CheckpointStore(Protocol):
    """All methods raise StoreError. Methods for which a key must exist raise NotStored when it does not."""

    def writing(self, key: str) -> AbstractContextManager[Path]:
        """An empty local directory to fill with files (no sub-directories). When the block ends, all files are stored
        under `key`, in place of older ones. If anything fails, none is stored."""
        ...

    def reading(self, key: str) -> AbstractContextManager[Path]:
        """A local directory that holds the stored files while the block runs. Do not write to it."""
        ...

    def copy(self, source: str, key: str) -> None:
        """Store the files of the key `source` under `key`, too, under which nothing else is stored. Either may be
        deleted without harm to the other. Several callers may make the same copy at once."""
        ...

    def files(self, key: str) -> dict[str, int]:
        """The sizes in bytes by file name, without the manifest."""
        ...

    def stream(self, key: str, file: str) -> Iterator[bytes]:
        """A file's contents, in pieces of about a megabyte."""
        ...

    def sign(self, key: str, expires_in_s: float) -> dict[str, str] | None:
        """Signed URLs by file name. Anybody can download from them for this time. None if the store has no signed
        URLs."""
        ...

    def delete(self, key: str) -> None:
        """Delete the files under this key, if there are any. If the deletion is interrupted, the rest does not count as
        stored."""
        ...

    def stored(self) -> list[StoredKey]:
        """All complete directories."""
        ...

    def walk(self) -> Iterator[StoredKey]:
        """As `stored`. A store on a disk looks for each when it is asked for."""
        ...

    def remove_leftovers(self, before: float, wanted: Callable[[str], bool] = any_group) -> None:
        """Remove incomplete directories that are older than `before` (seconds since the epoch), in `wanted` groups."""
        ...

    def owner(self) -> str | None:
        """The store's owner; None for a store without one."""
        ...

    def claim(self, owner: str) -> str:
        """Mark the store as `owner`'s if it has no owner. Returns its owner: an empty text where a server ended in the
        middle of this."""
        ...


def manifest_of(sizes: dict[str, int]) -> bytes:
    """The contents of `checkpoint_complete`: the stored files with their sizes."""
    return json.dumps({"files": dict(sorted(sizes.items()))}, indent=1).encode() + b"\n"


def sizes_in(manifest: bytes) -> dict[str, int]:
    """The reverse of `manifest_of`. Raises ValueError for anything else."""
    sizes = json.loads(manifest)["files"]
    if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
        raise ValueError("the manifest does not list sizes by file name")
    return sizes


T = TypeVar("T")

_THREADS = ThreadPoolExecutor(8, thread_name_prefix="checkpoint-store")


async def in_store(action: Callable[..., T], *arguments: Any) -> T:
    """`asyncio.to_thread` for methods of a CheckpointStore, and for functions that call them."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, action, *arguments)
