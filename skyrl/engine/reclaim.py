"""Taking back what nobody can use: models and queues of ended sessions, stored checkpoints without a row, adapters.

Files go last. An adapter is unloaded from every inference server first, and its directory stays for a while after that:
vLLM reads an evicted adapter again for a request that is still running, and dies if the directory is gone.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, and_, select, update

from skyrl.adapters import adapter_name_in
from skyrl.config import ServerConfig
from skyrl.db.checkpoints import checkpoints, pop_expired
from skyrl.db.database import Database
from skyrl.db.futures import SESSION_ENDED, futures, settle_where
from skyrl.db.models import models
from skyrl.db.samplers import adapter_in_use, samplers
from skyrl.db.sessions import sessions
from skyrl.storage.base import CheckpointStore, StoreError
from skyrl.storage.directories import id_of, is_scratch, remove, safe_name

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Between unloading an adapter and deleting its files; also how young an unknown directory is left alone."""
LISTING_S = 600.0
"""How often an object store is listed, and how young what has no row is left alone there: listing costs requests."""


@dataclass(frozen=True)
class Ended:
    """What ended with its session: models to drop from the backend, requests that were failed."""

    model_ids: list[str]
    request_ids: list[str]


def end_sessions(database: Database) -> Ended:
    """Close models, sampling sessions and pending requests of sessions that are over."""

    def over(connection: Connection) -> list[str]:
        open_models = select(models.c.session_id).where(models.c.status.in_(("creating", "ready")))
        open_samplers = select(samplers.c.session_id).where(samplers.c.status == "active")
        query = select(sessions.c.id).where(
            sessions.c.status != "active", sessions.c.id.in_(open_models) | sessions.c.id.in_(open_samplers)
        )
        return [row.id for row in connection.execute(query)]

    session_ids = database.read(over)
    if not session_ids:
        return Ended([], [])
    ended = Ended([], [])

    def close(connection: Connection) -> None:
        mine = and_(models.c.session_id.in_(session_ids), models.c.status.in_(("creating", "ready")))
        model_ids = [row.id for row in connection.execute(select(models.c.id).where(mine))]
        connection.execute(update(models).where(mine).values(status="closed"))
        connection.execute(update(samplers).where(samplers.c.session_id.in_(session_ids)).values(status="closed"))
        failed = settle_where(connection, futures.c.session_id.in_(session_ids), SESSION_ENDED, time.time())
        # Of all attempts: one whose commit only seemed lost leaves the next nothing to find.
        ended.model_ids.extend(model_ids)
        ended.request_ids.extend(failed)

    database.write(close)
    logger.info("sessions over: %s; models closed: %s", session_ids, ended.model_ids)
    return ended


class FileSweeper:
    """Finds files that no row refers to. For adapters in two steps: `unused_adapters`, unload, `delete_files`.

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

    def unused_adapters(self, saving: Collection[str]) -> list[tuple[str, Path]]:
        """(name, directory) of adapter versions that no sampling session and no checkpoint holds."""
        self._expired |= {row.store_key for row in self._database.write(lambda c: pop_expired(c, time.time()))}
        found = [path for model in _directories(self._config.adapters_dir) for path in _directories(model)]
        left = [path for path in found if path not in self._doomed and _is_left(path)]
        unused = self._database.read(lambda c: _unused(c, left, saving))
        return [(adapter_name_in(path), path) for path in unused]

    def unloaded(self, path: Path) -> None:
        """No inference server knows this adapter any more; its files may go after the grace time."""
        self._doomed[path] = time.time() + GRACE_S

    def delete_files(self, saving: Collection[str]) -> None:
        """Delete unloaded adapters whose time has come, stored checkpoints without a row, and what the dead left."""
        due = [path for path, at in self._doomed.items() if at <= time.time()]
        unused = self._database.read(
            lambda c: _unused(c, due, saving)
        )  # a save that was repeated may have taken its place
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
    """Those adapter directories that no checkpoint, no sampling session and no running save holds."""
    groups = {safe_name(model_id) for model_id in saving}
    saved = {row.directory for row in connection.execute(select(checkpoints.c.directory))}
    rest = [path for path in paths if str(path) not in saved and path.parent.name not in groups]
    return [path for path in rest if not adapter_in_use(connection, adapter_name_in(path))]


def _without_row(connection: Connection, keys: set[str], saving: Collection[str]) -> set[str]:
    """Those keys of the store that no checkpoint and no running save holds."""
    groups = {safe_name(model_id) for model_id in saving}
    kept = {row.store_key for row in connection.execute(select(checkpoints.c.store_key))}
    return {key for key in keys - kept if key.partition("/")[0] not in groups}


def _directories(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _is_left(path: Path) -> bool:
    """Whole, and old enough that it is no save whose row is just being written."""
    return not is_scratch(path) and _changed_at(path) < time.time() - GRACE_S


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
