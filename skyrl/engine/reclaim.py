"""Taking back what nobody can use: models and queues of ended sessions, files of expired checkpoints, adapters.

Files go last. An adapter is unloaded from every inference server first, and its directory stays for a while after that:
vLLM reads an evicted adapter again for a request that is still running, and dies if the directory is gone.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, and_, select, update

from skyrl.config import ServerConfig
from skyrl.db.checkpoints import checkpoints, pop_expired
from skyrl.db.database import Database
from skyrl.db.futures import SESSION_ENDED, futures, settle_where
from skyrl.db.models import models
from skyrl.db.samplers import adapter_in_use, samplers
from skyrl.db.sessions import sessions
from skyrl.engine.storage import id_of, is_scratch, remove
from skyrl.wire.paths import adapter_name_of

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Between unloading an adapter and deleting its files; also how young an unknown directory is left alone."""


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

    def close(connection: Connection) -> Ended:
        mine = and_(models.c.session_id.in_(session_ids), models.c.status.in_(("creating", "ready")))
        model_ids = [row.id for row in connection.execute(select(models.c.id).where(mine))]
        connection.execute(update(models).where(mine).values(status="closed"))
        connection.execute(update(samplers).where(samplers.c.session_id.in_(session_ids)).values(status="closed"))
        failed = settle_where(connection, futures.c.session_id.in_(session_ids), SESSION_ENDED, time.time())
        return Ended(model_ids, failed)

    ended = database.write(close)
    logger.info("sessions over: %s; models closed: %s", session_ids, ended.model_ids)
    return ended


class FileSweeper:
    """Finds directories that no row refers to. For adapters in two steps: `unused_adapters`, unload, `delete_files`."""

    def __init__(self, config: ServerConfig, database: Database) -> None:
        self._config = config
        self._database = database
        self._doomed: dict[Path, float] = {}
        self._started_at = time.time()

    def unused_adapters(self) -> list[tuple[str, Path]]:
        """(name, directory) of adapter versions that no sampling session and no checkpoint holds."""
        self._database.write(lambda c: pop_expired(c, time.time()))
        found = [path for model in _directories(self._config.adapters_dir) for path in _directories(model)]

        def unused(connection: Connection) -> list[tuple[str, Path]]:
            saved = {row.directory for row in connection.execute(select(checkpoints.c.directory))}
            rest = [path for path in found if str(path) not in saved and path not in self._doomed and _is_left(path)]
            named = [(_adapter_name(path), path) for path in rest]
            return [(name, path) for name, path in named if not adapter_in_use(connection, name)]

        return self._database.read(unused)

    def unloaded(self, path: Path) -> None:
        """No inference server knows this adapter any more; its files may go after the grace time."""
        self._doomed[path] = time.time() + GRACE_S

    def delete_files(self) -> None:
        """Delete unloaded adapters whose time has come, training checkpoints without a row, and what the dead left."""
        for path in [path for path, due in self._doomed.items() if due <= time.time()]:
            remove(path)
            del self._doomed[path]
        found = [path for model in _directories(self._config.checkpoints_dir) for path in _directories(model)]
        saved = self._database.read(lambda c: {row.directory for row in c.execute(select(checkpoints.c.directory))})
        for path in found:
            if str(path) not in saved and _is_left(path):
                remove(path)
        self._delete_leftovers()

    def _delete_leftovers(self) -> None:
        """Delete what a dead engine left: half-written or half-deleted directories, snapshots of closed models."""
        snapshots = self._config.snapshots_dir
        for root in (self._config.adapters_dir, self._config.checkpoints_dir, snapshots):
            for parent in (root, *_directories(root)):
                for path in _directories(parent):
                    if is_scratch(path) and _changed_at(path) < self._started_at:
                        remove(path)
        by_id = {id_of(path.name): path for path in _directories(snapshots) if not is_scratch(path)}
        closed = select(models.c.id).where(models.c.id.in_(by_id), models.c.status == "closed")
        for row in self._database.read(lambda c: list(c.execute(closed))):
            remove(by_id[row.id])


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


def _adapter_name(path: Path) -> str:
    """The adapter version that a directory was written for (the reverse of how handlers name it)."""
    if not path.name.startswith("v"):
        return ""
    return adapter_name_of(id_of(path.parent.name), int(path.name[1:]))
