"""How the files of an adapter version come to the host of a replica.

Knows the names of versions and where their files are. Loads no version on a replica, and reads no rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from skyrl.base.adapter_files import PEFT_TENSORS
from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.remote.cache import Daemons
from skyrl.inference.remote.references import reference_to
from skyrl.storage.checkpoint_store.base import CheckpointStore, NotStored, StoreError, in_store
from skyrl.storage.checkpoint_store.directories import fetch
from skyrl.storage.checkpoint_store.held import ON_ITS_WAY_S as ON_ITS_WAY_S
from skyrl.storage.checkpoint_store.held import leads_nowhere
from skyrl.storage.checkpoint_store.versions import version_directory, version_key

logger = logging.getLogger(__name__)

LOOKS_AT_ONCE = 4
FOUND_S, MAX_FOUND = 60.0, 10_000
"""How long, and for how many versions, a process does not ask the store again whether it has a version."""
StoreKey = Callable[[AdapterVersion], Awaitable[str | None]]
"""The key of the checkpoint that holds a version; None when no checkpoint holds it."""


class AdapterMissing(Exception):
    """The files of an adapter version are gone from the replica's host, and no checkpoint holds them."""

    def __init__(self, adapter: AdapterVersion) -> None:
        super().__init__(f"the files of adapter {adapter.name} are gone")
        self.adapter = adapter


class AdapterLost(AdapterMissing):
    """The version was in memory alone when the machine lost its power, or its container ended."""

    def __init__(self, adapter: AdapterVersion) -> None:
        super().__init__(adapter)
        self.sentence = (
            f"the weights {adapter.name} are lost: the server's machine lost its power, or its container was killed, "
            "before they were on its disk. Save the weights again"
        )


class AdapterUnavailable(Exception):
    """The files of an adapter version cannot be brought to the replica's host now; they may be later.

    `cause` is the underlying error. `reason` is that error in one line, for logs: unlike the message of this exception,
    it may name the operator's addresses.
    """

    def __init__(self, adapter: AdapterVersion, cause: Exception) -> None:
        super().__init__(f"the files of adapter {adapter.name} cannot be brought to the inference server now")
        self.adapter = adapter
        self.cause = cause
        self.reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]


class AdapterHost(Protocol):
    """Brings adapter versions to the host of a replica. `copies`: the replica reads files of its own, so that the
    stored files may be deleted while the replica has the version loaded."""

    @property
    def copies(self) -> bool: ...

    async def bring(self, adapter: AdapterVersion) -> str:
        """Make the version's files readable by the replica. Returns their directory as the replica sees it, or
        a reference by which the replica's node finds them.

        Raises AdapterMissing when the files are gone and no checkpoint holds them (AdapterLost: with the machine's
        power), AdapterUnavailable when the files cannot be brought for any other reason."""
        ...


class SharedDirectory:
    """The host of replicas that read the training server's state directory, under the same path as this process.

    A save writes a version's files there. If they are gone, they are fetched from the checkpoint store.
    """

    copies = False

    def __init__(self, state_dir: Callable[[], Path], store: CheckpointStore, store_key: StoreKey) -> None:
        self._state_dir = state_dir
        self._store = store
        self._store_key = store_key
        self._looks = Daemons(LOOKS_AT_ONCE)
        """A network file system may hang. Then neither reads of the database nor the end of the process wait."""

    async def bring(self, adapter: AdapterVersion) -> str:
        """As `AdapterHost.bring`.

        A gateway on another host may not see the training server's state directory, but its inference server does.
        There this method returns the path without a check.
        """
        try:
            state_dir = self._state_dir()
            directory = version_directory(state_dir, adapter)

            def is_there() -> bool:
                if not directory.is_dir():
                    return not state_dir.is_dir()
                if leads_nowhere(directory):
                    raise AdapterLost(adapter)
                return True

            if not await self._looks.run(is_there):
                await self._fetch(adapter, directory)
        except AdapterMissing:
            raise
        except Exception as error:  # a full disk, an unreachable database or checkpoint store
            raise AdapterUnavailable(adapter, error) from error
        return str(directory)

    async def _fetch(self, adapter: AdapterVersion, directory: Path) -> None:
        key = await self._store_key(adapter) or version_key(adapter)
        try:
            await in_store(fetch, self._store, key, directory)
        except NotStored as error:
            raise AdapterMissing(adapter) from error


class StoredAdapters:
    """The hosts of replicas that run elsewhere: each node fetches a version from the checkpoint store, once
    (`skyrl.inference.remote`). This process moves no files.

    A new version is handed to the nodes before the store has it: those that ask meanwhile get its reference, too. The
    engine has it below `state_dir`.

    A version that only a checkpoint holds, a copy or one from before the server used Ray, is copied within the store to
    its own key: there the sweep keeps it for those who sample from it, whatever becomes of the checkpoint."""

    copies = True

    def __init__(self, store: CheckpointStore, store_key: StoreKey, state_dir: Path | None = None) -> None:
        self._store = store
        self._store_key = store_key
        self._state_dir = state_dir
        self._looks = Daemons(LOOKS_AT_ONCE)
        self._found: dict[AdapterVersion, float] = {}
        """By version that was found in the store, until when that is taken for true."""

    async def bring(self, adapter: AdapterVersion) -> str:
        """As `AdapterHost.bring`. While the store is away, or has no such version and no checkpoint holds it, the
        reference is returned all the same: the node may have the files."""
        key = version_key(adapter)
        if self._found.get(adapter, 0.0) < time.monotonic() and await self.held(adapter) is None:
            await self._find(adapter, key)
        return reference_to(key)

    async def held(self, adapter: AdapterVersion) -> Path | None:
        """The files of a version that is in memory, as the store may not have it yet."""
        if self._state_dir is None:
            return None
        directory = version_directory(self._state_dir, adapter)
        try:
            is_held = await self._looks.run((directory / PEFT_TENSORS).is_symlink)
        except OSError:  # the store is asked
            return None
        return directory if is_held else None

    async def _find(self, adapter: AdapterVersion, key: str) -> None:
        try:
            await in_store(self._store.files, key)
        except NotStored:
            if not await self._copy(adapter, key):
                return
        except StoreError as error:
            logger.warning("whether the checkpoint store has adapter %s is not known: %s", adapter.name, error)
            return
        now = time.monotonic()
        if len(self._found) >= MAX_FOUND:
            self._found = {each: until for each, until in self._found.items() if until >= now}
        if len(self._found) < MAX_FOUND:
            self._found[adapter] = now + FOUND_S

    async def _copy(self, adapter: AdapterVersion, key: str) -> bool:
        """Store the files of the checkpoint that holds the version under `key`, too. Whether there is one."""
        try:
            saved = await self._store_key(adapter)
            if saved is None:
                return False
            await in_store(self._store.copy, saved, key)
            return True
        except NotStored as error:
            raise AdapterMissing(adapter) from error
        except Exception as error:  # a full disk, an unreachable database or checkpoint store
            raise AdapterUnavailable(adapter, error) from error


class HostOfOtherServer:
    """The hosts of replicas that another server runs. `host` looks up how that server's replicas find adapters."""

    copies = False

    def __init__(self, host: Callable[[], Awaitable[AdapterHost]]) -> None:
        self._host = host

    async def bring(self, adapter: AdapterVersion) -> str:
        """As `AdapterHost.bring`."""
        try:
            host = await self._host()
        except Exception as error:  # an unreachable database
            raise AdapterUnavailable(adapter, error) from error
        return await host.bring(adapter)
