"""Sampler weights that were saved before there was a checkpoint store: they are put there at the engine's start."""

from __future__ import annotations

import logging
from pathlib import Path

from sqlalchemy import select, update

from skyrl.db.checkpoints import checkpoints
from skyrl.db.database import Database
from skyrl.storage.base import CheckpointStore, StoreError
from skyrl.storage.directories import link_files

logger = logging.getLogger(__name__)


def adopt_adapters(database: Database, store: CheckpointStore) -> None:
    """One that cannot be stored now (its files are gone, the store is away) is logged, and tried again next time."""
    homeless = select(checkpoints.c.id, checkpoints.c.directory).where(checkpoints.c.store_key.is_(None))
    for row in database.read(lambda c: list(c.execute(homeless))):
        directory = Path(row.directory or "")
        key = f"{directory.parent.name}/{directory.name}-{row.id}"
        try:
            with store.writing(key) as scratch:
                link_files(directory, scratch)
        except (OSError, StoreError):
            logger.exception("the sampler weights in %s could not be put into the checkpoint store", directory)
            continue
        stored = update(checkpoints).where(checkpoints.c.id == row.id).values(store_key=key)
        database.write(lambda c, stored=stored: c.execute(stored))
