"""What a checkpoint store is: directories of files under keys, each whole or not there.

Knows keys, file names and bytes. Deliberately knows nothing of models, tenants or the database: what a key stands for,
and which keys somebody still needs, is its user's business. All methods block; call them from a thread.

A key is `<group>/<name>`, both made by `safe_name`. Both kinds of store lay files out alike, `<key>/<file>` plus the
manifest `<key>/checkpoint_complete`, so one becomes the other by copying everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MANIFEST = "checkpoint_complete"
OWNER = "skyrl-owner"


class StoreError(RuntimeError):
    """The store cannot be used: away, refused, or full. The message says what it said."""


class NotStored(StoreError):
    """Nothing is stored under this key, or no such file."""


@dataclass(frozen=True)
class StoredKey:
    """Something that is wholly stored, and since when (seconds since the epoch)."""

    key: str
    stored_at: float


class CheckpointStore(Protocol):
    """Raises StoreError everywhere, NotStored where a key must exist."""

    def writing(self, key: str) -> AbstractContextManager[Path]:
        """An empty local directory to fill with files (no sub-directories). When the block ends, they are stored under
        `key`, all of them or, if anything fails, none; what an earlier try left there is replaced."""
        ...

    def reading(self, key: str) -> AbstractContextManager[Path]:
        """A local directory that holds the stored files while the block runs; not to be written to."""
        ...

    def copy(self, source: str, key: str) -> None:
        """Store under `key` what is under `source`; each lives on when the other is deleted."""
        ...

    def files(self, key: str) -> dict[str, int]:
        """Names and sizes in bytes, without the manifest."""
        ...

    def stream(self, key: str, file: str) -> Iterator[bytes]:
        """A file's contents, in pieces of about a megabyte."""
        ...

    def sign(self, key: str, expires_in_s: float) -> dict[str, str] | None:
        """URLs by file name that anybody can download from, for a while; None where a store has no such thing."""
        ...

    def delete(self, key: str) -> None:
        """Delete what is stored, if it is. A deletion that is cut short leaves nothing that looks whole."""
        ...

    def stored(self) -> list[StoredKey]:
        """Everything that is wholly stored."""
        ...

    def remove_leftovers(self, before: float) -> None:
        """Remove what writers and deleters left that died before that time (seconds since the epoch)."""
        ...

    def claim(self, owner: str, instead_of: str | None = None) -> str:
        """Who this store belongs to: `owner`, if it had none, or was `instead_of`'s."""
        ...


def manifest_of(sizes: dict[str, int]) -> bytes:
    """What `checkpoint_complete` says: the files that were stored, with their sizes."""
    return json.dumps({"files": dict(sorted(sizes.items()))}, indent=1).encode() + b"\n"


def sizes_in(manifest: bytes) -> dict[str, int]:
    """The reverse of `manifest_of`. Raises ValueError for anything else."""
    sizes = json.loads(manifest)["files"]
    if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
        raise ValueError("the manifest does not list sizes by file name")
    return sizes
