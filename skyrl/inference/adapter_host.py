"""How the files of an adapter version come to the host on which a replica runs.

Knows names of versions and a way to their files. Does not tell a replica to load a version, and knows no rows.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from skyrl.storage.adapters import adapter_location
from skyrl.types.weights import AdapterVersion
from skyrl.wire.paths import adapter_version_of


class AdapterMissing(Exception):
    """The files of an adapter version are gone from the replica's host, and no checkpoint holds them."""

    def __init__(self, adapter: AdapterVersion) -> None:
        super().__init__(f"the files of adapter {adapter.name} are gone")
        self.adapter = adapter


class AdapterHost(Protocol):
    """Brings adapter versions to the host on which a replica runs."""

    async def bring(self, adapter: AdapterVersion) -> str:
        """Make the version's files readable by the replica; returns their directory as the replica sees it.

        Raises AdapterMissing when nobody has the files any more."""
        ...


class SharedDirectory:
    """The host of replicas that read the training server's state directory, under the same path as this process."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    async def bring(self, adapter: AdapterVersion) -> str:
        directory = self._state_dir / adapter_location(*adapter_version_of(adapter.name))
        if not await asyncio.to_thread(directory.is_dir):
            raise AdapterMissing(adapter)
        return str(directory)
