"""The sweep: every SWEEP_S, unload unused adapters, then delete files that no row refers to: adapters, snapshots of
closed models and of failed ones whose session has ended, stored checkpoints without a row, and what a dead engine left
behind half-written or half-deleted.

An adapter's files are deleted last. First the row of an adapter that nobody has sampled from for long is marked, so
that API processes refuse new samples from the adapter. Then the adapter is unloaded from all inference servers. Its
directory stays for GRACE_S more: vLLM may read an evicted adapter again for a running request, and dies if the
directory is gone. Adapters in the checkpoint store go the same way, by the keys that follow from their versions.

Full weights are read once and then not needed. A version goes when a newer one of its model is committed, or its model
has ended. Versions that were stored and never committed stay as long: their numbers must not be used again.

Each engine of a server deletes the files of models in its own scope (`FileScope`, by the model that a directory or
store key names): it knows neither the running saves of another engine nor the adapters that another engine's vLLM has
loaded. Files of the comparison at an engine's start (`trainer_probes`) have no model: they name their base model. The
checkpoint store knows its own leftovers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path

from skyrl.base.config.base_models import BaseModelSlot
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import AdapterVersion, FullWeights, WeightsRef
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.requests import LoadWeightsCommand
from skyrl.engine.threads import EngineSignals
from skyrl.inference.engine_group import EngineGroup
from skyrl.storage.checkpoint_store.base import CheckpointStore, StoreError
from skyrl.storage.checkpoint_store.directories import (
    id_of,
    is_scratch,
    old_scratch,
    remove,
    remove_empty,
    safe_name,
    subdirectories,
)
from skyrl.storage.checkpoint_store.held import HeldVersions
from skyrl.storage.checkpoint_store.versions import model_of, version_at, version_directory, version_in, version_key
from skyrl.storage.db import adapter_versions, full_weights
from skyrl.storage.db.checkpoints import Checkpoint, pop_expired, store_keys
from skyrl.storage.db.database import MAX_NAMED, Connection, Database, Displaced
from skyrl.storage.db.models import loads_to_repeat, over_among
from skyrl.storage.db.repeats import repeat
from skyrl.storage.db.scopes import models_in_scope
from skyrl.storage.db.uploads import drop_expired, kept_keys

SWEEP_S = 10.0


class Sweep:
    """Call all methods on the event loop. The sweeper uses the database and files on worker threads."""

    def __init__(self, sweeper: FileSweeper, group: EngineGroup | None, signals: EngineSignals) -> None:
        self._sweeper = sweeper
        self._group = group
        self._signals = signals

    async def run(self) -> None:
        """Sweep until cancelled. A sweep that fails is logged; the next one tries again."""
        await repeat("sweeping unused files", SWEEP_S, self.once)

    async def once(self) -> None:
        """One sweep. If this server has lost its claim to the database, the engine ends."""
        try:
            await self._sweep()
        except Displaced as error:
            self._signals.fail(error)

    async def _sweep(self) -> None:
        sweeper = self._sweeper
        await asyncio.to_thread(sweeper.drop_idle)
        unused = await asyncio.to_thread(sweeper.unused_adapters)
        for adapter in unused if self._group is None else await self._group.retire(unused):
            sweeper.unloaded(adapter)
        await asyncio.to_thread(sweeper.delete_files)


logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""The time between unloading an adapter and deleting its files. Younger directories without a row are kept: a save may
still be writing the row."""
LISTING_S = 600.0
"""How often an object store is listed, because listing costs requests. Younger files without a row are kept there."""


class FileSweeper:
    """Deletes files that no row refers to. The steps for adapters are: `drop_idle`; `unused_adapters`; the caller
    unloads the returned adapters; `unloaded`; `delete_files`."""

    def __init__(
        self,
        config: ServerConfig,
        database: Database,
        store: CheckpointStore,
        confirm_claim: Callable[[], object] = lambda: None,
        saving: Callable[[], Collection[str]] = lambda: (),
        held: HeldVersions | None = None,
    ) -> None:
        """`confirm_claim` is called before each deletion. It raises when this server has lost the claim: the files
        may then belong to another server.

        `saving` returns the models with a running save. A save writes its files long before its row, because the files
        first go to the checkpoint store and to vLLM. So it is called after files were found and before rows are read: a
        save that has ended by then has its row."""
        self._config = config
        self._scope = config.role.scope
        self._files = FileScope(config.role, database)
        self._database = database
        self._store = store
        self._confirm_claim = confirm_claim
        self._saving = saving
        self._held = held
        self._deletable_at: dict[AdapterVersion, float] = {}
        """By unloaded adapter, when its files may be deleted, in seconds since the epoch."""
        self._stored: dict[AdapterVersion, float] = {}
        """The adapters that the last listing found in the checkpoint store under keys of their own, with the time when
        each was stored."""
        self._versions: set[FullWeights] = set()
        """Versions of the full weights that are, or may be, in the checkpoint store under keys of their own."""
        self._newest: FullWeights | None = None
        """The newest version at the last sweep."""
        self._expired: set[str] = set()
        """The checkpoint store's keys of expired checkpoints."""
        self._started_at, self._started_monotonic = time.time(), time.monotonic()
        self._remote = config.checkpoint_store is not None and not config.checkpoint_store.startswith("file:")
        self._listing_due = 0.0

    def drop_idle(self) -> None:
        """Mark adapter versions that no checkpoint holds and that nobody has sampled from for `unnamed_saves_idle_s`.
        Their files stay for `adapter_versions.NOTICE_S`, in which running samples end."""
        used_before = time.time() - self._config.unnamed_saves_idle_s
        if idle := self._database.read(lambda c: adapter_versions.idle(c, used_before, self._scope)):
            dropped = self._database.write(lambda c: adapter_versions.drop(c, idle, used_before))
            if dropped:
                logger.info("dropped adapters that nobody sampled from for long: %s", ", ".join(map(str, dropped)))

    def unused_adapters(self) -> list[AdapterVersion]:
        """Adapter versions that have files here or in the checkpoint store, and that no sampling session and no
        checkpoint holds. At most MAX_NAMED; the next call finds the rest."""
        expired = self._database.write(self._pop_expired)
        self._expired |= {checkpoint.store_key for checkpoint in expired}
        paths = [path for model in subdirectories(self._config.adapters_dir) for path in subdirectories(model)]
        here = (adapter for path in paths if isinstance(adapter := version_in(path), AdapterVersion))
        found = dict.fromkeys([*here, *self._stored])
        mine = self._files.among(adapter.model_id for adapter in found)
        loaded = [adapter for adapter in found if adapter not in self._deletable_at and adapter.model_id in mine]
        return self._database.read(lambda c: self._unused(c, loaded))

    def _pop_expired(self, connection: Connection) -> list[Checkpoint]:
        drop_expired(connection)
        return pop_expired(connection, time.time(), self._scope)

    def unloaded(self, adapter: AdapterVersion) -> None:
        """Note that no inference server has this adapter any more. Its files may be deleted after GRACE_S."""
        self._deletable_at[adapter] = time.time() + GRACE_S

    def delete_files(self) -> None:
        """Delete adapters GRACE_S after their unloading, stored checkpoints without a row, and half-written files of
        dead processes."""
        due = [adapter for adapter, at in self._deletable_at.items() if at <= time.time()][:MAX_NAMED]
        if due:  # looked up once more: a deletion cannot be undone
            unused = self._database.read(lambda c: self._unused(c, due))
            for adapter in due:
                if adapter in unused:
                    self._delete_adapter(adapter)
                del self._deletable_at[adapter]
        if self._held is not None:
            self._held.copy_all()  # what could not be copied before
        self._sweep_full_weights()
        self._delete_leftovers()
        try:
            self._sweep_store()
        except StoreError as error:  # the next sweep lists it
            logger.warning("the checkpoint store cannot be listed: %s", error)
        self._sweep_stored_versions()

    def _sweep_full_weights(self) -> None:
        """Delete versions of the full weights on this disk that are not current: nobody can sample from them.
        Checkpoints have files of their own."""
        found = [path for model in subdirectories(self._config.full_weights_dir) for path in subdirectories(model)]
        mine = self._files.among(id_of(path.parent.name) for path in found)
        mature = [path for path in found if not is_scratch(path) and _changed_at(path) < time.time() - GRACE_S]
        old = [path for path in mature if id_of(path.parent.name) in mine]
        if not old:
            return
        kept = {safe_name(model_id) for model_id in self._saving()}
        now = self._database.write(self._replace_full_weights) if self._config.full_finetuning else None
        for path in old:
            if path.parent.name not in kept and (version := version_in(path)) is not None and version != now:
                self._remove(path)

    def _sweep_stored_versions(self) -> None:
        """Delete versions of the full weights in the checkpoint store that were replaced, or whose model has ended,
        unless a checkpoint holds them."""
        newest = self._database.read(lambda c: full_weights.in_training(c, self._config.role.own))
        if newest is not None and self._config.weights_travel:
            last = self._newest if self._newest and self._newest.model_id == newest.model_id else newest
            committed = range(max(1, last.number), newest.number + 1)
            self._versions.update(FullWeights.of(newest.model_id, number) for number in committed)
        self._newest = newest
        ended = {v for v in self._versions if newest is None or v.model_id != newest.model_id}
        over = ended | {v for v in self._versions - ended if newest is not None and v.number < newest.number}
        if not over:
            return
        self._database.write(self._replace_full_weights)
        kept = self._database.read(store_keys)
        for version in sorted(over, key=str):
            if version_key(version) not in kept:
                self._delete_stored(version_key(version))
        self._versions -= over

    def _delete_adapter(self, adapter: AdapterVersion) -> None:
        directory = version_directory(self._config.state_dir, adapter)
        if directory.is_dir():
            self._remove(directory)
        if self._stored.pop(adapter, None) is not None:
            self._delete_stored(version_key(adapter))

    def _sweep_store(self) -> None:
        """Delete the files of expired checkpoints. If a listing of the checkpoint store is due, also delete other files
        without a row."""
        unused, self._expired = self._expired, set()
        now = time.time()
        if now >= self._listing_due:
            self._confirm_claim()
            self._store.remove_leftovers(self._before(), self._files.has_group)
            grace_s = LISTING_S if self._remote else GRACE_S
            listed = self._listed()
            versions = {key: version for key in listed if (version := version_at(key)) is not None}
            self._stored = {each: listed[key] for key, each in versions.items() if isinstance(each, AdapterVersion)}
            self._versions.update(each for each in versions.values() if isinstance(each, FullWeights))
            old = {key for key, stored_at in listed.items() if stored_at < now - grace_s}
            unused |= self._without_row(old - versions.keys())
            self._listing_due = now + (LISTING_S if self._remote else 0.0)
        for key in sorted(unused - self._loaded_keys() if unused else ()):
            version = version_at(key)
            if isinstance(version, FullWeights):
                self._versions.add(version)
            elif version is None:  # an adapter may be sampled from without its checkpoint
                self._delete_stored(key)

    def _loaded_keys(self) -> set[str]:
        """The keys of checkpoints that recovery would load again. A later listing finds them when it would not."""
        loads = self._database.read(loads_to_repeat)
        return {key for body in loads if (key := decode_json(LoadWeightsCommand, body).loaded_key) is not None}

    def _listed(self) -> dict[str, float]:
        """The stored keys of models in the scope, with the times when they were stored."""
        listed = {found.key: found.stored_at for found in self._store.stored()}
        models = {key: model_of(key.partition("/")[0]) for key in listed}
        mine = self._files.among(models.values())
        return {key: stored_at for key, stored_at in listed.items() if models[key] in mine}

    def _replace_full_weights(self, connection: Connection) -> WeightsRef:
        """Close sampling sessions of versions that are not current. Returns the current weights."""
        now = full_weights.current(connection, self._config.role.own)
        full_weights.drop_replaced(connection, now, self._scope)
        return now

    def _delete_stored(self, key: str) -> None:
        self._confirm_claim()
        try:
            self._store.delete(key)
        except StoreError as error:
            logger.warning("checkpoint %s could not be deleted; the server tries again later: %s", key, error)

    def _without_row(self, keys: set[str]) -> set[str]:
        groups = {safe_name(model_id) for model_id in self._saving()}
        kept = self._database.read(lambda c: store_keys(c) | kept_keys(c))
        return {key for key in keys - kept if key.partition("/")[0] not in groups}

    def _before(self) -> float:
        """Directories that are older than this (seconds since the epoch) are a dead engine's: this one had not started.
        The clock may have been set back since."""
        return min(self._started_at, time.time() - (time.monotonic() - self._started_monotonic))

    def _delete_leftovers(self) -> None:
        """Half-written directories of models that are not in scope stay: another engine may be writing them. Those
        beside the models' directories are only deleted, which several processes may do."""
        config, before, files = self._config, self._before(), self._files
        for root in (config.adapters_dir, config.full_weights_dir, config.snapshots_dir):
            by_model = {id_of(path.name): path for path in subdirectories(root) if not is_scratch(path)}
            old = {model_id: found for model_id, path in by_model.items() if (found := old_scratch(path, before))}
            for path in (*old_scratch(root, before), *(path for model in files.among(old) for path in old[model])):
                self._remove(path)
            for path in by_model.values():
                remove_empty(path)
        if config.role.scope.has_rest:
            for path in old_scratch(config.state_dir / "scratch", before):  # of API processes
                self._remove(path)
        by_id = {id_of(path.name): path for path in subdirectories(config.snapshots_dir) if not is_scratch(path)}
        for model_id in files.among(self._database.read(lambda c: over_among(c, by_id.keys()))):
            self._remove(by_id[model_id])

    def _remove(self, path: Path) -> None:
        self._confirm_claim()
        remove(path)

    def _unused(self, connection: Connection, adapters: Sequence[AdapterVersion]) -> list[AdapterVersion]:
        """The unused ones of these adapters, at most MAX_NAMED: old enough, and needed by no checkpoint, no sampling
        session, no sample and no running save. Makes two queries, however many adapters there are."""
        saving = self._saving()
        held = adapter_versions.held(connection, time.time()) if adapters else set()
        free = (adapter for adapter in adapters if adapter not in held and adapter.model_id not in saving)
        old = list(islice((adapter for adapter in free if self._is_old(adapter)), MAX_NAMED))
        sampled = adapter_versions.sampled_now(connection, old)
        return [adapter for adapter in old if adapter not in sampled]

    def _is_old(self, adapter: AdapterVersion) -> bool:
        """Whether an adapter's files are so old that no save can still be writing its row."""
        now = time.time()
        if (stored_at := self._stored.get(adapter)) is not None:
            return stored_at < now - (LISTING_S if self._remote else GRACE_S)
        return _changed_at(version_directory(self._config.state_dir, adapter)) < now - GRACE_S


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


_PROBE = re.compile(r"start-check-\d+-?(.*)")


def new_probe(role: BaseModelSlot) -> str:
    """The name of a model for one comparison. It is new at each start: a server that has loaded a name never loads
    other files by it. Digits, because two causes of a failed start are compared without their numbers."""
    number = f"start-check-{secrets.randbelow(10**12)}"
    return f"{number}-{role.name}" if role.name else number


class FileScope:
    """The models whose files an engine may delete."""

    def __init__(self, role: BaseModelSlot, database: Database) -> None:
        self._role = role
        self._database = database

    def among(self, model_ids: Iterable[str]) -> set[str]:
        """Those of `model_ids` whose files belong to this engine. One query if the server has several engines, and none
        if it has one."""
        ids = set(model_ids)
        if self._role.scope.is_everything:
            return ids
        probes = {model_id: match[1] for model_id in ids if (match := _PROBE.fullmatch(model_id)) is not None}
        own = {model_id for model_id, name in probes.items() if self._owns_probe(name)}
        return own | self._database.read(lambda c: models_in_scope(c, ids - probes.keys(), self._role.scope))

    def has_group(self, group: str) -> bool:
        """Whether keys of the checkpoint store that begin with this group belong to this engine."""
        return bool(self.among([model_of(group)]))

    def _owns_probe(self, role_name: str) -> bool:
        return role_name == self._role.name or (not role_name and self._role.scope.has_rest)
