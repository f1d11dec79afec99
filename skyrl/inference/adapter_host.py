"""How the files of an adapter version come to the host on which a replica runs.

Knows names of versions and a way to their files. Does not tell a replica to load a version, and knows no rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from skyrl.storage.adapters import adapter_directory
from skyrl.storage.base import CheckpointStore, NotStored
from skyrl.storage.directories import fetch
from skyrl.storage.threads import in_store
from skyrl.types.weights import AdapterVersion

StoreKey = Callable[[AdapterVersion], Awaitable[str | None]]
"""The key of the checkpoint that holds a version; None when no checkpoint holds it."""


class AdapterMissing(Exception):
    """The files of an adapter version are gone from the replica's host, and no checkpoint holds them."""

    def __init__(self, adapter: AdapterVersion) -> None:
        super().__init__(f"the files of adapter {adapter.name} are gone")
        self.adapter = adapter


class AdapterUnavailable(Exception):
    """The files of an adapter version cannot be brought to the replica's host now; they may be later.

    `cause` is the error behind this one. `reason` says it in one line, for logs: it may name the operator's addresses,
    which the message of this exception does not.
    """

    def __init__(self, adapter: AdapterVersion, cause: Exception) -> None:
        super().__init__(f"the files of adapter {adapter.name} cannot be brought to the inference server now")
        self.adapter = adapter
        self.cause = cause
        self.reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]


class AdapterHost(Protocol):
    """Brings adapter versions to the host on which a replica runs."""

    async def bring(self, adapter: AdapterVersion) -> str:
        """Make the version's files readable by the replica; returns their directory as the replica sees it.

        Raises AdapterMissing when nobody has the files any more, AdapterUnavailable when it fails in any other way."""
        ...


class SharedDirectory:
    """The host of replicas that read the training server's state directory, under the same path as this process.

    The files of a version are there since it was saved. Files that are gone are fetched from the checkpoint store.
    """

    def __init__(self, state_dir: Callable[[], Path], store: CheckpointStore, store_key: StoreKey) -> None:
        self._state_dir = state_dir
        self._store = store
        self._store_key = store_key

    async def bring(self, adapter: AdapterVersion) -> str:
        """As `AdapterHost.bring`.

        A gateway on another host than the training server may not see the state directory. Its inference server does,
        so the path is returned, and nobody here can tell whether the files are there.
        """
        try:
            state_dir = self._state_dir()
            directory = adapter_directory(state_dir, adapter)
            if await asyncio.to_thread(_is_missing, state_dir, directory):
                await self._fetch(adapter, directory)
        except AdapterMissing:
            raise
        except Exception as error:  # the database is away, the disk is full, the checkpoint store is away
            raise AdapterUnavailable(adapter, error) from error
        return str(directory)

    async def _fetch(self, adapter: AdapterVersion, directory: Path) -> None:
        key = await self._store_key(adapter)
        if key is None:
            raise AdapterMissing(adapter)
        try:
            await in_store(fetch, self._store, key, directory)
        except NotStored as error:
            raise AdapterMissing(adapter) from error


def _is_missing(state_dir: Path, directory: Path) -> bool:
    """Whether this process sees the state directory, and no such directory in it."""
    return state_dir.is_dir() and not directory.is_dir()
