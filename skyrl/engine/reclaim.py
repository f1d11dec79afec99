"""Taking back what nobody can use: models and queues of ended sessions, stored checkpoints without a row, adapters.

Files are deleted last. First the row of an adapter that nobody has sampled from for long is marked, so that API
processes refuse new samples from it. Then the adapter is unloaded from all inference servers. Its directory stays for a
while after that: vLLM reads an evicted adapter again for a request that is still running, and dies if the directory is
gone.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path

from skyrl.config.server import ServerConfig
from skyrl.db import adapter_versions
from skyrl.db.checkpoints import pop_expired, store_keys
from skyrl.db.database import Connection, Database
from skyrl.db.futures import MAX_NAMED
from skyrl.db.models import closed_among
from skyrl.storage.adapters import adapter_directory, adapter_in
from skyrl.storage.base import CheckpointStore, StoreError
from skyrl.storage.directories import id_of, is_scratch, remove, safe_name
from skyrl.types.weights import AdapterVersion

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""The time between unloading an adapter and deleting its files. A younger directory without a row is left alone: it may
be a save whose row is being written."""
LISTING_S = 600.0
"""How often an object store is listed, which costs requests. Younger files without a row are left alone there."""


class FileSweeper:
    """Deletes files that no row refers to. The steps for adapters are: `drop_idle`, `unused_adapters`, the caller
    unloads these, `unloaded`, `delete_files`.

    `saving` holds the models with a save that is running; the caller asks for it before each call. The files of a save
    are there long before its row: they go to the checkpoint store and to vLLM first.
    """

    def __init__(
        self,
        config: ServerConfig,
        database: Database,
        store: CheckpointStore,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """`confirm` is called before each deletion. It raises when this server has lost its claim to train: the files
        may be another server's by then."""
        self._config = config
        self._database = database
        self._store = store
        self._confirm = confirm
        self._doomed: dict[Path, float] = {}
        """Directories of unloaded adapters, with the time at which each may be deleted."""
        self._expired: set[str] = set()
        """Keys in the checkpoint store of checkpoints that have expired."""
        self._started_at = time.time()
        self._remote = config.checkpoint_store is not None and not config.checkpoint_store.startswith("file:")
        self._listing_due = 0.0

    def drop_idle(self) -> None:
        """Mark adapter versions that no checkpoint has and that nobody has sampled from for `unnamed_saves_idle_s`.
        Their files are deleted after NOTICE_S, when samples that still run have ended."""
        used_before = time.time() - self._config.unnamed_saves_idle_s
        if idle := self._database.read(lambda c: adapter_versions.idle(c, used_before)):
            dropped = self._database.write(lambda c: adapter_versions.drop(c, idle, used_before))
            if dropped:
                logger.info("adapters that nobody sampled from for long are dropped: %s", ", ".join(map(str, dropped)))

    def unused_adapters(self, saving: Collection[str]) -> list[AdapterVersion]:
        """Adapter versions whose files are here and that no sampling session and no checkpoint holds, at most
        MAX_NAMED: the next call finds the rest."""
        expired = self._database.write(lambda c: pop_expired(c, time.time()))
        self._expired |= {checkpoint.store_key for checkpoint in expired if checkpoint.store_key is not None}
        found = [path for model in _directories(self._config.adapters_dir) for path in _directories(model)]
        left = [path for path in found if path not in self._doomed and not is_scratch(path)]
        return list(self._database.read(lambda c: _unused(c, left, saving)))

    def unloaded(self, adapter: AdapterVersion) -> None:
        """No inference server knows this adapter any more. Its files may be deleted after the grace time."""
        self._doomed[adapter_directory(self._config.state_dir, adapter)] = time.time() + GRACE_S

    def delete_files(self, saving: Collection[str]) -> None:
        """Delete unloaded adapters whose grace time is over, stored checkpoints without a row, and half-written files
        of dead processes."""
        due = [path for path, at in self._doomed.items() if at <= time.time()][:MAX_NAMED]
        if due:  # a save that was repeated may have written the same version again
            unused = self._database.read(lambda c: _unused(c, due, saving))
            for path in due:
                if path in unused.values():
                    self._remove(path)
                del self._doomed[path]
        self._delete_leftovers()
        self._sweep_store(saving)

    def _sweep_store(self, saving: Collection[str]) -> None:
        """Delete the files of expired checkpoints at once, and other files without a row when the checkpoint store is
        listed again."""
        doomed, self._expired = self._expired, set()
        now = time.time()
        if now >= self._listing_due:
            self._confirm()
            self._store.remove_leftovers(self._started_at)
            grace_s = LISTING_S if self._remote else GRACE_S
            old = {found.key for found in self._store.stored() if found.stored_at < now - grace_s}
            doomed |= self._without_row(old, saving)
            self._listing_due = now + (LISTING_S if self._remote else 0.0)
        for key in sorted(doomed):
            self._confirm()
            try:
                self._store.delete(key)
            except StoreError as error:
                logger.warning("checkpoint %s could not be deleted; it is tried again later: %s", key, error)

    def _without_row(self, keys: set[str], saving: Collection[str]) -> set[str]:
        """The keys that no checkpoint and no running save holds."""
        groups = {safe_name(model_id) for model_id in saving}
        kept = self._database.read(store_keys)
        return {key for key in keys - kept if key.partition("/")[0] not in groups}

    def _delete_leftovers(self) -> None:
        """Delete what a dead engine left: half-written or half-deleted directories, snapshots of closed models."""
        snapshots = self._config.snapshots_dir
        for root in (self._config.adapters_dir, snapshots):
            for parent in (root, *_directories(root)):
                for path in _directories(parent):
                    if is_scratch(path) and _changed_at(path) < self._started_at:
                        self._remove(path)
        by_id = {id_of(path.name): path for path in _directories(snapshots) if not is_scratch(path)}
        for model_id in self._database.read(lambda c: closed_among(c, by_id.keys())):
            self._remove(by_id[model_id])

    def _remove(self, path: Path) -> None:
        self._confirm()
        remove(path)


def _unused(connection: Connection, paths: Sequence[Path], saving: Collection[str]) -> dict[AdapterVersion, Path]:
    """The adapter directories, at most MAX_NAMED, that are old enough and that no checkpoint, no sampling session, no
    sample and no running save needs. Two queries, however many directories there are."""
    groups = {safe_name(model_id) for model_id in saving}
    held = adapter_versions.held(connection, time.time()) if paths else set()
    named = ((adapter_in(path), path) for path in paths if path.parent.name not in groups)
    free = ((adapter, path) for adapter, path in named if adapter is not None and adapter not in held)
    few = dict(islice(((adapter, path) for adapter, path in free if _is_old(path)), MAX_NAMED))
    running = adapter_versions.sampled_now(connection, few.keys())
    return {adapter: path for adapter, path in few.items() if adapter not in running}


def _directories(parent: Path) -> list[Path]:
    """Sub-directories, sorted by name. One scan, with no further look at each of them."""
    try:
        with os.scandir(parent) as entries:
            return [parent / name for name in sorted(entry.name for entry in entries if entry.is_dir())]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_old(path: Path) -> bool:
    """Whether it is too old to be a save whose row is being written."""
    return _changed_at(path) < time.time() - GRACE_S


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
