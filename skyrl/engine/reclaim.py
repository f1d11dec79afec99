"""Taking back what nobody can use: models and queues of ended sessions, stored checkpoints without a row, adapters.

Files go last. Of an adapter that nobody has sampled from for long, the row is marked first, so that API processes
refuse new samples from it. Every adapter is unloaded from all inference servers before its files go, and its directory
stays for a while after that: vLLM reads an evicted adapter again for a request that is still running, and dies if the
directory is gone.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from sqlalchemy import select

from skyrl.config.server import ServerConfig
from skyrl.db import adapter_versions
from skyrl.db.checkpoints import checkpoints, pop_expired
from skyrl.db.database import Connection, Database
from skyrl.db.futures import MAX_NAMED
from skyrl.db.models import models
from skyrl.storage.adapters import adapter_name_in
from skyrl.storage.base import CheckpointStore, StoreError
from skyrl.storage.directories import id_of, is_scratch, remove, safe_name

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Between unloading an adapter and deleting its files; also how young an unknown directory is left alone."""
LISTING_S = 600.0
"""How often an object store is listed, and how young what has no row is left alone there: listing costs requests."""


class FileSweeper:
    """Finds files that no row refers to. For adapters in steps: `drop_idle`, `unused_adapters`, unload, `delete_files`.

    `saving`: models with a save that is running, asked for before. Its files are there long before its row is: they
    go to the store and to vLLM first.
    """

    def __init__(
        self,
        config: ServerConfig,
        database: Database,
        store: CheckpointStore,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """`confirm` is called before each deletion, and raises when this server does not train any more: the files may
        then be another server's."""
        self._config = config
        self._database = database
        self._store = store
        self._confirm = confirm
        self._doomed: dict[Path, float] = {}
        self._expired: set[str] = set()
        self._started_at = time.time()
        self._remote = config.checkpoint_store is not None and not config.checkpoint_store.startswith("file:")
        self._listing_due = 0.0

    def drop_idle(self) -> None:
        """Mark adapter versions that no checkpoint has and that nobody has sampled from for `unnamed_saves_idle_s`.
        Their files follow, after NOTICE_S and when samples that still run have ended."""
        used_before = time.time() - self._config.unnamed_saves_idle_s
        if idle := self._database.read(lambda c: adapter_versions.idle(c, used_before)):
            dropped = self._database.write(lambda c: adapter_versions.drop(c, idle, used_before))
            if dropped:
                logger.info("adapters that nobody sampled from for long are dropped: %s", dropped)

    def unused_adapters(self, saving: Collection[str]) -> list[tuple[str, Path]]:
        """(name, directory) of adapter versions that no sampling session and no checkpoint holds, at most MAX_NAMED:
        the next call finds the rest."""
        self._expired |= {row.store_key for row in self._database.write(lambda c: pop_expired(c, time.time()))}
        found = [path for model in _directories(self._config.adapters_dir) for path in _directories(model)]
        left = [path for path in found if path not in self._doomed and not is_scratch(path)]
        unused = self._database.read(lambda c: _unused(c, left, saving))
        return [(adapter_name_in(path), path) for path in unused]

    def unloaded(self, path: Path) -> None:
        """No inference server knows this adapter any more; its files may go after the grace time."""
        self._doomed[path] = time.time() + GRACE_S

    def delete_files(self, saving: Collection[str]) -> None:
        """Delete unloaded adapters whose time has come, stored checkpoints without a row, and what the dead left."""
        due = [path for path, at in self._doomed.items() if at <= time.time()][:MAX_NAMED]
        if due:  # a save that was repeated may have taken the place of one
            unused = self._database.read(lambda c: _unused(c, due, saving))
            for path in due:
                if path in unused:
                    self._remove(path)
                del self._doomed[path]
        self._delete_leftovers()
        self._sweep_store(saving)

    def _sweep_store(self, saving: Collection[str]) -> None:
        """What has expired at once; what else has no row when the store is listed again."""
        doomed = {key for key in self._expired if key is not None}
        self._expired.clear()
        now = time.time()
        if now >= self._listing_due:
            self._confirm()
            self._store.remove_leftovers(self._started_at)
            grace_s = LISTING_S if self._remote else GRACE_S
            old = {found.key for found in self._store.stored() if found.stored_at < now - grace_s}
            doomed |= self._database.read(lambda c: _without_row(c, old, saving))
            self._listing_due = now + (LISTING_S if self._remote else 0.0)
        for key in sorted(doomed):
            self._confirm()
            try:
                self._store.delete(key)
            except StoreError as error:
                logger.warning("checkpoint %s could not be deleted; it is tried again later: %s", key, error)

    def _delete_leftovers(self) -> None:
        """Delete what a dead engine left: half-written or half-deleted directories, snapshots of closed models."""
        snapshots = self._config.snapshots_dir
        for root in (self._config.adapters_dir, snapshots):
            for parent in (root, *_directories(root)):
                for path in _directories(parent):
                    if is_scratch(path) and _changed_at(path) < self._started_at:
                        self._remove(path)
        by_id = {id_of(path.name): path for path in _directories(snapshots) if not is_scratch(path)}
        closed = select(models.c.id).where(models.c.id.in_(by_id), models.c.status == "closed")
        for row in self._database.read(lambda c: list(c.execute(closed))):
            self._remove(by_id[row.id])

    def _remove(self, path: Path) -> None:
        self._confirm()
        remove(path)


def _unused(connection: Connection, paths: Sequence[Path], saving: Collection[str]) -> list[Path]:
    """Those adapter directories that no checkpoint, no sampling session, no sample and no running save needs, and that
    are old enough; at most MAX_NAMED. Two queries, however many directories there are."""
    groups = {safe_name(model_id) for model_id in saving}
    held = adapter_versions.held(connection, time.time()) if paths else set()
    named = ((adapter_name_in(path), path) for path in paths if path.parent.name not in groups)
    free = {name: path for name, path in named if name not in held and _is_old(path)}
    few = dict(list(free.items())[:MAX_NAMED])
    running = adapter_versions.sampled_now(connection, few.keys())
    return [path for name, path in few.items() if name not in running]


def _without_row(connection: Connection, keys: set[str], saving: Collection[str]) -> set[str]:
    """Those keys of the store that no checkpoint and no running save holds."""
    groups = {safe_name(model_id) for model_id in saving}
    kept = {row.store_key for row in connection.execute(select(checkpoints.c.store_key))}
    return {key for key in keys - kept if key.partition("/")[0] not in groups}


def _directories(parent: Path) -> list[Path]:
    """Sub-directories in order of their names, without asking the file system about each of them."""
    try:
        with os.scandir(parent) as entries:
            return [parent / name for name in sorted(entry.name for entry in entries if entry.is_dir())]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_old(path: Path) -> bool:
    """Old enough that it is no save whose row is just being written."""
    return _changed_at(path) < time.time() - GRACE_S


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
