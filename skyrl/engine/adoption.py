"""What the engine does about adapters when it starts: says where they lie, and completes rows of earlier versions."""

from __future__ import annotations

import logging
from pathlib import Path

from sqlalchemy import func, select, update

from skyrl.config.server import ServerConfig
from skyrl.db.adapter_versions import OPEN, samplers
from skyrl.db.checkpoints import checkpoints
from skyrl.db.database import Connection, Database
from skyrl.db.engine_state import publish_state_dir
from skyrl.storage.base import CheckpointStore, StoreError
from skyrl.storage.directories import link_files, sizes_of

logger = logging.getLogger(__name__)


def adopt_adapters(config: ServerConfig, database: Database, store: CheckpointStore) -> None:
    """Make the rows about adapters complete. Raises what the database raises; what cannot be done now is logged, and
    tried again at the next start."""
    database.write(lambda c: publish_state_dir(c, str(config.state_dir)))
    _store(config.state_dir, database, store)
    _measure(config.state_dir, database)
    _tell_of_outside(database)


def _store(state_dir: Path, database: Database, store: CheckpointStore) -> None:
    """Put sampler weights that were saved before there was a checkpoint store into it."""
    homeless = select(checkpoints.c.id, checkpoints.c.directory).where(
        checkpoints.c.store_key.is_(None), checkpoints.c.directory.is_not(None)
    )
    for row in database.read(lambda c: list(c.execute(homeless))):
        directory = state_dir / row.directory
        key = f"{directory.parent.name}/{directory.name}-{row.id}"
        try:
            with store.writing(key) as scratch:
                link_files(directory, scratch)
        except (OSError, StoreError):
            logger.exception("the sampler weights in %s could not be put into the checkpoint store", directory)
            continue
        stored = update(checkpoints).where(checkpoints.c.id == row.id).values(store_key=key)
        database.write(lambda c, stored=stored: c.execute(stored))


def _measure(state_dir: Path, database: Database) -> None:
    """Note the size of adapters that were saved before sizes were noted."""
    unknown = select(samplers.c.id, samplers.c.adapter_path).where(
        OPEN, samplers.c.adapter_path.is_not(None), samplers.c.size_bytes.is_(None)
    )
    sizes: dict[str, int] = {}
    for row in database.read(lambda c: list(c.execute(unknown))):
        directory = state_dir / row.adapter_path
        if directory.is_dir():
            sizes[row.id] = sum(sizes_of(directory).values())

    def change(connection: Connection) -> None:
        for sampler_id, size in sizes.items():
            connection.execute(update(samplers).where(samplers.c.id == sampler_id).values(size_bytes=size))

    if sizes:
        database.write(change)


def _tell_of_outside(database: Database) -> None:
    """Paths are relative to the state directory; an absolute one is of an earlier version, and of no known form."""
    for path, condition in ((samplers.c.adapter_path, OPEN), (checkpoints.c.directory, checkpoints.c.id.is_not(None))):
        outside = select(func.count(), func.min(path)).where(condition, path.like("/%"))
        number, example = database.read(lambda c, outside=outside: c.execute(outside).one())
        if number:
            logger.warning(
                "%s has paths outside the state directory (%d, such as %s): these adapters are read there, and a copy "
                "of the state directory does not hold them",
                path.table.name,
                number,
                example,
            )
