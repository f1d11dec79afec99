"""Whether a save may be made: the tenant's stored bytes and sampling sessions, and free space on the server's disks.

The engine asks when a save's turn comes. The API cannot refuse a save on arrival: the save's seq_id would be missing,
and the model's later commands would wait for it. Knows sizes and limits; does not know what a save writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.base.wire.paths import TinkerPath
from skyrl.sampling.quota_account import QuotaLimits, sampling_sessions_sentence, stored_sentence
from skyrl.storage.checkpoint_store.registry import local_directory, saves_disk
from skyrl.storage.db import quotas
from skyrl.storage.db.database import Connection, Database


class SaveLimits:
    """Each check raises FailedRequest."""

    def __init__(self, config: ServerConfig, database: Database) -> None:
        self._config = config
        self._database = database
        self._disk = saves_disk(config)

    def check_disk(self) -> None:
        """Refuse when a disk that saves are written to has less than `min_free_disk_bytes` free."""
        bound = self._config.min_free_disk_bytes
        for directory in self._directories():
            free = shutil.disk_usage(directory).free
            if free < bound:
                raise FailedRequest(
                    f"the server's disk is nearly full: {free} bytes are free in {directory.name!r}, and saves leave "
                    f"{bound} free (min_free_disk_bytes). Nothing was saved; save again when the operator has made "
                    "room",
                    ErrorCategory.SERVER,
                )

    def check_stored(self, tenant: str, besides: TinkerPath | None = None) -> None:
        """Refuse when the tenant's stored bytes have reached its quota, or its share of the disk. The checkpoint at
        `besides`, which the save would replace, does not count."""

        of_tenant = quotas.StoredBytes(tenant, besides)

        def read(connection: Connection) -> str | None:
            limits = QuotaLimits.of(self._config).with_exceptions(quotas.exceptions_of(connection, tenant))
            if (limit := limits.stored_bytes) is not None:
                stored = of_tenant.now(connection)
                if stored >= limit:
                    return stored_sentence(stored, limit)
            return quotas.over_disk_share(connection, of_tenant, self._disk)

        if (sentence := self._database.read(read)) is not None:
            raise FailedRequest(f"over quota: {sentence}")

    def check_sampling_sessions(self, tenant: str) -> None:
        """Refuse an unnamed save, which opens a sampling session, when those of the tenant's active sessions have
        reached their limit."""
        bound = self._config.max_sampling_sessions_per_tenant
        living = self._database.read(lambda c: quotas.living_samplers(c, tenant))
        if living >= bound:
            raise FailedRequest(sampling_sessions_sentence(living, bound))

    def _directories(self) -> Iterator[Path]:
        """The state directory, and the directory of a checkpoint store on a disk. For a directory that does not exist
        yet: its nearest parent that exists."""
        for directory in (self._config.state_dir, local_directory(self._config)):
            if directory is not None:
                yield next(path for path in (directory, *directory.parents) if path.is_dir())
