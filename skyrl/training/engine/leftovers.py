"""Deleting what a dead engine left behind: half-written or half-deleted directories, snapshots of closed models.

Knows the directories of the state directory. The checkpoint store knows its own leftovers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.storage.checkpoint_store.directories import id_of, is_scratch, old_scratch, subdirectories
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import closed_among
from skyrl.training.engine.file_scope import FileScope


def delete_leftovers(
    config: ServerConfig,
    database: Database,
    before: float,
    files: FileScope,
    remove: Callable[[Path], object],
) -> None:
    """`before` is the engine's start, in seconds since the epoch. Half-written directories of models that are not in
    `files` stay: another engine may be writing them. Those beside the models' directories are only deleted, which
    several processes may do."""
    for root in (config.adapters_dir, config.full_weights_dir, config.snapshots_dir):
        by_model = {id_of(path.name): path for path in subdirectories(root) if not is_scratch(path)}
        old = {model_id: found for model_id, path in by_model.items() if (found := old_scratch(path, before))}
        for path in (*old_scratch(root, before), *(path for model_id in files.among(old) for path in old[model_id])):
            remove(path)
    if config.role.scope.has_rest:
        for path in old_scratch(config.state_dir / "scratch", before):  # of API processes
            remove(path)
    by_id = {id_of(path.name): path for path in subdirectories(config.snapshots_dir) if not is_scratch(path)}
    for model_id in files.among(database.read(lambda c: closed_among(c, by_id.keys()))):
        remove(by_id[model_id])
