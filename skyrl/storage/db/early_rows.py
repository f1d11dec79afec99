"""Rows of early versions that the engine completes when it starts: they lack keys in the checkpoint store, sizes of
adapters, or files in the directory that follows from a version's name.

A migration cannot complete them, because that needs the state directory and the checkpoint store.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select, update

from skyrl.base.types.weights import EVERYTHING, AdapterVersion, Scope
from skyrl.storage.db.adapter_versions import OPEN, OPEN_ADAPTER, samplers
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.scopes import in_scope


def adapters_elsewhere(connection: Connection, scope: Scope = EVERYTHING) -> dict[AdapterVersion, str]:
    """The directories of needed versions that are not the directories that follow from the versions' names. Relative
    paths begin at the state directory."""
    sampled, saved = samplers.c.old_directory.is_not(None), checkpoints.c.old_directory.is_not(None)
    queries = (
        select(samplers.c.weights, samplers.c.old_directory).where(
            OPEN_ADAPTER, sampled, in_scope(samplers.c.base_model, scope)
        ),
        select(checkpoints.c.weights, checkpoints.c.old_directory).where(
            saved, in_scope(checkpoints.c.base_model, scope)
        ),
    )
    rows = [row for query in queries for row in connection.execute(query)]
    return {row.weights: row.old_directory for row in rows if isinstance(row.weights, AdapterVersion)}


def set_in_place(connection: Connection, adapter: AdapterVersion) -> None:
    """Store that the files of this version are in the directory that follows from its name."""
    for table in (samplers, checkpoints):
        connection.execute(update(table).where(table.c.weights == adapter).values(old_directory=None))


def adapters_not_stored(connection: Connection, scope: Scope = EVERYTHING) -> dict[int, AdapterVersion]:
    """By the id of the checkpoint: versions that were saved under a name and are not in the checkpoint store."""
    query = select(checkpoints.c.id, checkpoints.c.weights).where(
        checkpoints.c.store_key.is_(None),
        checkpoints.c.weights.is_not(None),
        in_scope(checkpoints.c.base_model, scope),
    )
    return {row.id: row.weights for row in connection.execute(query) if isinstance(row.weights, AdapterVersion)}


def set_stored(connection: Connection, checkpoint_id: int, store_key: str) -> None:
    """Store that the files of a checkpoint are in the checkpoint store under this key."""
    connection.execute(update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(store_key=store_key))


def adapters_not_measured(connection: Connection, scope: Scope = EVERYTHING) -> dict[str, AdapterVersion]:
    """By the id of the sampling session: versions of unknown size."""
    query = select(samplers.c.id, samplers.c.weights).where(
        OPEN_ADAPTER, samplers.c.size_bytes.is_(None), in_scope(samplers.c.base_model, scope)
    )
    return {row.id: row.weights for row in connection.execute(query) if isinstance(row.weights, AdapterVersion)}


def set_sizes(connection: Connection, sizes: Mapping[str, int]) -> None:
    """Store the sizes in bytes of versions, by the ids of their open sampling sessions."""
    for sampler_id, size in sizes.items():
        connection.execute(update(samplers).where(samplers.c.id == sampler_id, OPEN).values(size_bytes=size))
