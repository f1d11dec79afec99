"""Adopting weights at the engine's start: publish where their files are, store those that lie on this disk alone if
nodes fetch them from the checkpoint store, and complete rows of earlier skyrl versions.

A migration cannot complete these rows, because that needs the files: a key in the checkpoint store, a size, or files in
the directory that follows from the version's name. Each engine adopts the weights of its own scope.
"""

from __future__ import annotations

import logging
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import FullWeights, Scope
from skyrl.storage.checkpoint_store.base import CheckpointStore, NotStored, StoreError
from skyrl.storage.checkpoint_store.directories import atomic_directory, fetch, link_files, sizes_of
from skyrl.storage.checkpoint_store.versions import adapter_directory, adapter_key, full_directory, full_key
from skyrl.storage.db import adapter_versions, early_rows, full_weights
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_state_dir

logger = logging.getLogger(__name__)


def adopt_adapters(config: ServerConfig, database: Database, store: CheckpointStore) -> None:
    """Complete the rows of adapters. Failures are logged, and the next start tries again. Raises only the errors of the
    database."""
    travels, scope = config.weights_travel, config.role.scope
    state_dir = None if travels else str(config.state_dir)
    database.write(lambda c: publish_state_dir(c, state_dir, config.role.state_keys[0]))
    _link_into_place(config.state_dir, database, scope)
    _store_sampler_weights(config.state_dir, database, store, scope)
    _record_sizes(config.state_dir, database, scope)
    if travels:
        _store_unnamed(config, database, store)


def adopt_full_weights(config: ServerConfig, database: Database, store: CheckpointStore) -> None:
    """Bring the current version of the full weights to where vLLM looks for it: into the checkpoint store, or, after a
    time with Ray, onto this disk. A failure is logged. Raises only the errors of the database."""
    weights = database.read(lambda c: full_weights.current(c, config.role.own))
    if not isinstance(weights, FullWeights):
        return
    directory, key = full_directory(config.state_dir, weights), full_key(weights)
    try:
        if config.weights_travel and directory.is_dir():
            _store_once(store, key, directory)
        elif not config.weights_travel and not directory.is_dir():
            fetch(store, key, directory)
    except (OSError, StoreError):
        logger.exception("the weights %s could not be brought to where vLLM looks for them", weights.version)


def _store_once(store: CheckpointStore, key: str, directory: Path) -> None:
    """Store the files of a directory unless the key is stored. Raises OSError and StoreError."""
    try:
        store.files(key)
    except NotStored:
        with store.writing(key) as scratch:
            link_files(directory, scratch)


def _link_into_place(state_dir: Path, database: Database, scope: Scope) -> None:
    """Link the files of adapters in other directories into the directories that follow from their names. The old files
    stay."""
    for adapter, elsewhere in database.read(lambda c: early_rows.adapters_elsewhere(c, scope)).items():
        directory = adapter_directory(state_dir, adapter)
        try:
            if not directory.is_dir():
                with atomic_directory(directory) as scratch:
                    link_files(state_dir / elsewhere, scratch)
        except OSError:
            logger.exception("adapter %s could not be brought in from %s", adapter.name, elsewhere)
            continue
        logger.info("adapter %s was brought in from %s", adapter.name, elsewhere)
        database.write(lambda c, adapter=adapter: early_rows.set_in_place(c, adapter))


def _store_sampler_weights(state_dir: Path, database: Database, store: CheckpointStore, scope: Scope) -> None:
    """Store sampler weights that were saved before there was a checkpoint store."""
    for checkpoint_id, adapter in database.read(lambda c: early_rows.adapters_not_stored(c, scope)).items():
        directory = adapter_directory(state_dir, adapter)
        key = f"{directory.parent.name}/{directory.name}-{checkpoint_id}"
        try:
            with store.writing(key) as scratch:
                link_files(directory, scratch)
        except (OSError, StoreError):
            logger.exception("the sampler weights in %s could not be put into the checkpoint store", directory)
            continue
        database.write(lambda c, n=checkpoint_id, key=key: early_rows.set_stored(c, n, key))


def _record_sizes(state_dir: Path, database: Database, scope: Scope) -> None:
    """Record the sizes of adapters that were saved before sizes were recorded."""
    sizes = {}
    for sampler_id, adapter in database.read(lambda c: early_rows.adapters_not_measured(c, scope)).items():
        directory = adapter_directory(state_dir, adapter)
        if directory.is_dir():
            sizes[sampler_id] = sum(sizes_of(directory).values())
    if sizes:
        database.write(lambda c: early_rows.set_sizes(c, sizes))


def _store_unnamed(config: ServerConfig, database: Database, store: CheckpointStore) -> None:
    """Store adapters that are in the state directory alone: saved without a name while the server did not use Ray, or
    held by a sampling session after their checkpoint was deleted."""
    for adapter in database.read(lambda c: adapter_versions.not_saved(c, config.role.scope)):
        directory = adapter_directory(config.state_dir, adapter)
        if not directory.is_dir():
            continue
        try:
            _store_once(store, adapter_key(adapter), directory)
        except (OSError, StoreError):
            logger.exception("adapter %s could not be put into the checkpoint store", adapter.name)
