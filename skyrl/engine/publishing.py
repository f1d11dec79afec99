"""Brings weights to the inference servers: the adapter, or version of the full weights, that a save has just written.

Also puts the base model's weights back when the model that was fine-tuned as a whole has ended.

At the engine's start the weights of its own scope are adopted: those are published that have their files, weights that
lie on this disk alone are stored if nodes fetch them from the checkpoint store, and rows of earlier skyrl versions are
completed. A migration cannot complete these rows, because that needs the files: a key in the checkpoint store, a size,
or files in the directory that follows from the version's name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future

import httpx

from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights, served_version
from skyrl.base.wire.errors import FailedRequest
from skyrl.engine.threads import EngineThreads
from skyrl.inference.adapter_host import AdapterMissing, AdapterUnavailable
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.full_weights import VersionFiles
from skyrl.inference.remote.references import BASE_MODEL, base_directory, reference_to
from skyrl.inference.vllm_client import VllmError
from skyrl.storage.checkpoint_store.base import CheckpointStore, StoreError
from skyrl.storage.checkpoint_store.directories import fetch, store_once
from skyrl.storage.checkpoint_store.held import AWAY_S
from skyrl.storage.checkpoint_store.versions import version_directory, version_key
from skyrl.storage.db import adapter_versions, full_weights
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_state_dir
from skyrl.storage.db.models import find_model

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Without a group (skyrl does not run the inference server), adapters are loaded when samples need them."""

    def __init__(
        self, config: ServerConfig, database: Database, group: EngineGroup | None, threads: EngineThreads
    ) -> None:
        self._config = config
        self._database = database
        self._group = group
        self._threads = threads
        self._order = asyncio.Lock()
        """Full weights change one after another."""
        self._restoring: set[asyncio.Task[None]] = set()

    def publish(self, weights: AdapterVersion | FullWeights) -> Future[None] | None:
        """Bring the weights to all inference servers. Called on a file thread, before the save is settled.

        Full weights are there when this returns, because a server is not used before it has the newest. Raises
        FailedRequest when the model has ended meanwhile, and NotPublished when all servers refuse them.

        For an adapter, returns what ends, with no error, when it is loaded or could not be: settle the save meanwhile.
        It succeeds even if a server is away, and a sample that comes before the adapter has it loaded.
        """
        if self._group is None:
            return None
        if isinstance(weights, FullWeights):
            self._threads.wait_for_loop(self._publish_full(self._group, weights))
            return None
        return self._threads.begin_on_loop(self._publish_adapter(self._group, weights))

    async def _publish_adapter(self, group: EngineGroup, adapter: AdapterVersion) -> None:
        try:
            await group.publish_adapter(adapter)
        except (httpx.TransportError, VllmError, AdapterMissing) as error:
            logger.warning("adapter %s was saved but not loaded yet: %s", adapter.name, error)
        except AdapterUnavailable as error:
            logger.warning("adapter %s was saved but not loaded yet: %s (%s)", adapter.name, error, error.reason)
        except Exception:  # the save is settled without it
            logger.exception("adapter %s was saved but not loaded yet", adapter.name)

    async def _publish_full(self, group: EngineGroup, weights: FullWeights) -> None:
        async with self._order:
            model = await self._database.read_async(lambda c: find_model(c, weights.model_id))
            if model is None or not model.is_living:
                raise FailedRequest(f"model_id: model {weights.model_id!r} has ended while its weights were saved")
            await group.publish_weights(version_files(self._config, weights))

    def restore_current(self) -> None:
        """A model has ended: put the base model's weights back, in the background. Called on the event loop."""
        if self._group is not None and self._config.full_finetuning:
            task = asyncio.create_task(self._restore_current(self._group))
            self._restoring.add(task)
            task.add_done_callback(self._restoring.discard)

    async def _restore_current(self, group: EngineGroup) -> None:
        async with self._order:
            try:
                own = self._config.role.own
                now = await self._database.read_async(lambda c: full_weights.current(c, own))
                await group.want_weights(version_files(self._config, now))
            except Exception:  # nobody is given samples of these weights: samples of the base model wait
                logger.exception("the weights of the inference servers were not put back")

    async def close(self) -> None:
        for task in self._restoring:
            task.cancel()
        await asyncio.gather(*self._restoring, return_exceptions=True)


def version_files(config: ServerConfig, weights: BaseWeights | FullWeights) -> VersionFiles:
    """The files of a version: directories of this machine, or what nodes find by themselves."""
    is_base = isinstance(weights, BaseWeights)
    if config.weights_travel:
        location = BASE_MODEL if is_base else reference_to(version_key(weights))
    else:
        location = base_directory(config.base_model_path) if is_base else version_directory(config.state_dir, weights)
    return VersionFiles(served_version(weights), str(location))


def adopt_adapters(config: ServerConfig, database: Database, store: CheckpointStore) -> None:
    """Publish where this server's adapters are, and store those that nodes will fetch. Failures are logged, and the
    next start tries again. Raises only the errors of the database."""
    travels = config.weights_travel
    state_dir = None if travels else str(config.state_dir)
    database.write(lambda c: publish_state_dir(c, state_dir, config.role.state_keys[0]))
    if travels:
        _store_unnamed(config, database, store)


def adopt_full_weights(config: ServerConfig, database: Database, store: CheckpointStore) -> None:
    """Bring the current version of the full weights to where vLLM looks for it: into the checkpoint store, or, after a
    time with Ray, onto this disk. A failure is logged. Raises only the errors of the database."""
    weights = database.read(lambda c: full_weights.current(c, config.role.own))
    if not isinstance(weights, FullWeights):
        return
    directory, key = version_directory(config.state_dir, weights), version_key(weights)
    try:
        if config.weights_travel and directory.is_dir():
            store_once(store, key, directory)
        elif not config.weights_travel and not directory.is_dir():
            fetch(store, key, directory)
    except (OSError, StoreError):
        logger.exception("the weights %s could not be brought to where vLLM looks for them", weights.name)


def _store_unnamed(config: ServerConfig, database: Database, store: CheckpointStore) -> None:
    """Store adapters that are in the state directory alone: saved without a name while the server did not use Ray, or
    held by a sampling session after their checkpoint was deleted."""
    for adapter in database.read(lambda c: adapter_versions.not_saved(c, config.role.scope)):
        directory = version_directory(config.state_dir, adapter)
        if not directory.is_dir():
            continue
        began = time.monotonic()
        try:
            store_once(store, version_key(adapter), directory)
        except (OSError, StoreError):
            logger.exception("adapter %s could not be put into the checkpoint store", adapter.name)
            if time.monotonic() - began > AWAY_S:
                return  # the others would wait for the store as long
