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

A sweep looks at LOOKED directories of each kind; the next one goes on from there (`Rounds`). Rows are deleted in short
transactions with pauses, so that samples are written in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.rounds import Rounds
from skyrl.base.types.weights import AdapterVersion, FullWeights, WeightsRef
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.requests import LoadWeightsCommand
from skyrl.engine.file_scope import FileScope
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
from skyrl.storage.db.checkpoints import pop_expired, stored_among
from skyrl.storage.db.database import MAX_NAMED, Connection, Database, Displaced, in_groups
from skyrl.storage.db.models import loads_to_repeat, over_among
from skyrl.storage.db.repeats import repeat
from skyrl.storage.db.retention import StepSize
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
LOOKED = 2_000
"""How many directories of each kind a sweep looks at."""
STEP_ROWS, PAUSE_S = 50, 0.01
"""The most rows that a write transaction changes, and the pause between two."""


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
        self._listed: dict[AdapterVersion, float] = {}
        """Those that the running listing has found."""
        self._adapters = Rounds(self._each_adapter)
        self._listing = Rounds(lambda: store.walk())
        self._models = Rounds(self._each_model_directory)
        self._snapshots = Rounds(lambda: _directories_of_models(config.snapshots_dir))
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
        idle = self._database.read(lambda c: adapter_versions.idle(c, used_before, self._scope))
        for some in in_groups(idle, STEP_ROWS):
            dropped = self._database.write(lambda c, some=some: adapter_versions.drop(c, some, used_before))
            if dropped:
                logger.info("dropped adapters that nobody sampled from for long: %s", ", ".join(map(str, dropped)))
            time.sleep(PAUSE_S)

    def unused_adapters(self) -> list[AdapterVersion]:
        """Adapter versions that have files here or in the checkpoint store, and that no sampling session and no
        checkpoint holds: those among the next LOOKED, at most MAX_NAMED. The next call goes on after them."""
        self._drop_expired_rows()
        found: dict[AdapterVersion, None] = {}
        looked = 0
        while looked < LOOKED and len(found) < MAX_NAMED and (some := self._adapters.take(MAX_NAMED)):
            looked += len(some)
            mine = self._files.among(adapter.model_id for adapter in some)
            loaded = [each for each in some if each not in self._deletable_at and each.model_id in mine]
            found |= dict.fromkeys(self._database.read(lambda c, loaded=loaded: self._unused(c, loaded)))
            if not self._adapters.is_amid:
                break
        return list(found)

    def _each_adapter(self) -> Iterator[AdapterVersion]:
        for model in subdirectories(self._config.adapters_dir):
            for path in subdirectories(model):
                if isinstance(adapter := version_in(path), AdapterVersion):
                    yield adapter
        yield from list(self._stored)

    def _drop_expired_rows(self) -> None:
        """Forget uploads and at most MAX_NAMED checkpoints whose time is over. Their files go with `delete_files`."""
        self._database.write(drop_expired)
        size, left = StepSize(STEP_ROWS), MAX_NAMED
        while left > 0:
            most = min(size.number, left)
            pop = size.measured(lambda c, _, most=most: pop_expired(c, time.time(), most, self._scope))
            expired = self._database.write(pop)
            self._expired.update(expired)
            if len(expired) < most:
                return
            left -= most
            time.sleep(PAUSE_S)

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
        kept = self._database.read(lambda c: stored_among(c, map(version_key, over)))
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
        """Delete the files of expired checkpoints. If a listing of the checkpoint store is due or runs, also delete the
        files without a row among its next LOOKED keys."""
        unused, self._expired = self._expired, set()
        now = time.time()
        if now >= self._listing_due:
            unused |= self._list_some(now)
        for key in sorted(unused - self._loaded_keys() if unused else ()):
            version = version_at(key)
            if isinstance(version, FullWeights):
                self._versions.add(version)
            elif version is None:  # an adapter may be sampled from without its checkpoint
                self._delete_stored(key)

    def _list_some(self, now: float) -> set[str]:
        """Goes on with the listing. Returns the keys without a row that are old enough to be deleted."""
        self._confirm_claim()
        if not self._listing.is_amid:
            self._store.remove_leftovers(self._before(), self._files.has_group)
            self._listed = {}
        found = self._listing.take(LOOKED)
        models = {each.key: model_of(each.key.partition("/")[0]) for each in found}
        mine = self._files.among(models.values())
        listed = {each.key: each.stored_at for each in found if models[each.key] in mine}
        versions = {key: version for key in listed if (version := version_at(key)) is not None}
        adapters = {each: listed[key] for key, each in versions.items() if isinstance(each, AdapterVersion)}
        self._listed |= adapters
        self._stored |= adapters
        self._versions.update(each for each in versions.values() if isinstance(each, FullWeights))
        if not self._listing.is_amid:
            self._stored = self._listed
            self._listing_due = now + (LISTING_S if self._remote else 0.0)
        grace_s = LISTING_S if self._remote else GRACE_S
        return self._without_row({key for key, at in listed.items() if at < now - grace_s} - versions.keys())

    def _loaded_keys(self) -> set[str]:
        """The keys of checkpoints that recovery would load again. A later listing finds them when it would not."""
        loads = self._database.read(loads_to_repeat)
        return {key for body in loads if (key := decode_json(LoadWeightsCommand, body).loaded_key) is not None}

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
        kept = self._database.read(lambda c: stored_among(c, keys) | kept_keys(c)) if keys else set[str]()
        return {key for key in keys - kept if key.partition("/")[0] not in groups}

    def _before(self) -> float:
        """Directories that are older than this (seconds since the epoch) are a dead engine's: this one had not started.
        The clock may have been set back since."""
        return min(self._started_at, time.time() - (time.monotonic() - self._started_monotonic))

    def _delete_leftovers(self) -> None:
        """Half-written directories of models that are not in scope stay: another engine may be writing them. Those
        beside the models' directories are only deleted, which several processes may do."""
        config, before, files = self._config, self._before(), self._files
        for root in self._roots:
            for path in old_scratch(root, before):
                self._remove(path)
        by_model = {path: id_of(path.name) for path in self._models.take(MAX_NAMED)}
        old = {path: found for path in by_model if (found := old_scratch(path, before))}
        mine = files.among(by_model[path] for path in old)
        for path in (scratch for model, found in old.items() if by_model[model] in mine for scratch in found):
            self._remove(path)
        for path in by_model:
            remove_empty(path)
        if config.role.scope.has_rest:
            for path in old_scratch(config.state_dir / "scratch", before):  # of API processes
                self._remove(path)
        by_id = {id_of(path.name): path for path in self._snapshots.take(MAX_NAMED)}
        for model_id in files.among(self._database.read(lambda c: over_among(c, by_id.keys()))):
            self._remove(by_id[model_id])

    @property
    def _roots(self) -> tuple[Path, ...]:
        return self._config.adapters_dir, self._config.full_weights_dir, self._config.snapshots_dir

    def _each_model_directory(self) -> Iterator[Path]:
        for root in self._roots:
            yield from _directories_of_models(root)

    def _remove(self, path: Path) -> None:
        self._confirm_claim()
        remove(path)

    def _unused(self, connection: Connection, adapters: Sequence[AdapterVersion]) -> list[AdapterVersion]:
        """The unused ones of these adapters, which are at most MAX_NAMED: old enough, and needed by no checkpoint, no
        sampling session, no sample and no running save. Makes two queries, however many adapters there are."""
        saving = self._saving()
        held = adapter_versions.held(connection, time.time(), adapters) if adapters else set()
        free = (adapter for adapter in adapters if adapter not in held and adapter.model_id not in saving)
        old = [adapter for adapter in free if self._is_old(adapter)]
        sampled = adapter_versions.sampled_now(connection, old)
        return [adapter for adapter in old if adapter not in sampled]

    def _is_old(self, adapter: AdapterVersion) -> bool:
        """Whether an adapter's files are so old that no save can still be writing its row."""
        now = time.time()
        if (stored_at := self._stored.get(adapter)) is not None:
            return stored_at < now - (LISTING_S if self._remote else GRACE_S)
        return _changed_at(version_directory(self._config.state_dir, adapter)) < now - GRACE_S


def _directories_of_models(root: Path) -> list[Path]:
    return [path for path in subdirectories(root) if not is_scratch(path)]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
