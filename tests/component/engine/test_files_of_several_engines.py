"""The sweepers of two engines on one state directory: each deletes the files of its own models alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from several_engines import ENTRIES, FIRST, SECOND
from sqlalchemy import insert, select, update

from skyrl.base.config.loading import load_config
from skyrl.base.config.several import base_models_of
from skyrl.base.types.weights import AdapterVersion, FullWeights, LoraSpec, WeightsRef
from skyrl.base.wire.paths import TinkerPath
from skyrl.engine import sweeping
from skyrl.engine.sweeping import FileScope, FileSweeper, new_probe
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory, version_key
from skyrl.storage.db.adapter_versions import NEWEST, samplers
from skyrl.storage.db.checkpoints import Checkpoint, put, store_keys
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import Model, model_values, models
from skyrl.storage.db.samplers import Sampler, add_sampler
from skyrl.storage.db.tables import SessionRow
from tests.databases import make_tables

LONG_AGO = time.time() - 3600
UNKNOWN = "unknown"
SCRATCH = ".tmp-0123456789abcdef"
LORA = LoraSpec(4, 8.0, 1)


class World:
    """A database with one model of each base model, named like it; and the configurations of both engines."""

    def __init__(self, state_dir: Path, **flags: Any) -> None:
        self.state_dir = state_dir
        self.configs = base_models_of(load_config({"state_dir": state_dir, "base_models": ENTRIES, **flags}))
        self.database = Database(self.configs[0].database)
        make_tables(self.database)
        session = {"id": "s", "tenant": "t", "status": "active", "created_at": 0.0, "heartbeat_at": time.time()}
        self.database.write(lambda c: c.execute(insert(SessionRow), session | {"sdk_version": "", "tags": []}))
        for number, name in enumerate((FIRST, SECOND)):
            values = model_values(Model(name, "s", "t", name, LORA, None), number, "ready", 2 * NEWEST)
            self.database.write(lambda c, values=values: c.execute(insert(models), values))

    def sweeper(self, number: int) -> FileSweeper:
        """That of an engine that has just been started."""
        config = self.configs[number]
        return FileSweeper(config, self.database, open_store(config))

    def add_sampler(self, name: str, number: int, weights: WeightsRef) -> str:
        sampler = Sampler(f"s:sample:{name}:{number}", "s", "t", name, None, weights)
        seq_id = number + 100 * (name == SECOND)
        self.database.write(lambda c: add_sampler(c, sampler, seq_id))
        return sampler.id

    def save(self, name: str, **values: Any) -> str:
        """A stored checkpoint with its row. Returns its store key."""
        key = f"{safe_name(name)}/saved-{name}"
        self.store(key)
        row = Checkpoint(
            TinkerPath(name, "weights", "saved"), "t", key, None, name, LORA, 1, False, None, 0.0, **values
        )
        self.database.write(lambda c: put(c, row))
        return key

    def store(self, key: str) -> str:
        """Files under a key, stored long ago."""
        with open_store(self.configs[0]).writing(key) as directory:
            (directory / "file").write_bytes(b"x")
        if (local := self.configs[0].checkpoints_dir / key).is_dir():
            os.utime(local, (LONG_AGO, LONG_AGO))
        return key


def old_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x")
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.database.close()


def test_an_engine_that_starts_keeps_what_the_other_is_writing(world: World) -> None:
    """It was begun before this engine started, so it looks like a leftover."""
    first = world.configs[0]
    roots = (first.adapters_dir, first.full_weights_dir, first.snapshots_dir, first.checkpoints_dir)
    written = {name: [old_directory(root / name / SCRATCH) for root in roots] for name in (FIRST, SECOND, UNKNOWN)}
    world.sweeper(1).delete_files(())
    assert not any(path.exists() for path in written[SECOND])
    assert all(path.exists() for name in (FIRST, UNKNOWN) for path in written[name])
    again = [old_directory(path) for path in written[SECOND]]
    world.sweeper(0).delete_files(())
    assert not any(path.exists() for name in (FIRST, UNKNOWN) for path in written[name])
    assert all(path.exists() for path in again)


def test_adapters_without_a_row_are_unloaded_and_deleted_by_the_engine_of_their_model(world: World) -> None:
    """vLLM dies if the files of an evicted adapter are gone, and only the engine of its base model knows its vLLM."""
    versions = {name: AdapterVersion.of(name, 1) for name in (FIRST, SECOND, UNKNOWN)}
    for adapter in versions.values():
        old_directory(version_directory(world.state_dir, adapter))
    assert world.sweeper(0).unused_adapters(()) == [versions[FIRST], versions[UNKNOWN]]
    assert world.sweeper(1).unused_adapters(()) == [versions[SECOND]]


def test_stored_keys_without_a_row_are_deleted_by_the_engine_of_their_model(world: World) -> None:
    keys = {name: world.store(f"{name}/nobodys-1") for name in (FIRST, SECOND, UNKNOWN)}
    kept = {world.save(FIRST, expires_at=None), world.save(SECOND, expires_at=None)}
    world.sweeper(1).delete_files(())
    assert {found.key for found in open_store(world.configs[0]).stored()} == kept | {keys[FIRST], keys[UNKNOWN]}
    world.sweeper(0).delete_files(())
    assert {found.key for found in open_store(world.configs[0]).stored()} == kept


def test_versions_in_an_object_store_belong_to_the_engine_of_their_model(
    tmp_path: Path, new_bucket: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "LISTING_S", -60.0)  # so that no file is too young to be deleted
    bucket = new_bucket()
    world = World(tmp_path, checkpoint_store=bucket.url, checkpoint_store_options=bucket.options)
    adapters = {name: AdapterVersion.of(name, 1) for name in (FIRST, SECOND)}
    for name, adapter in adapters.items():
        world.store(version_key(adapter))
        world.store(version_key(FullWeights.of(name, 1)))
    for number, name in enumerate((FIRST, SECOND)):
        sweeper = world.sweeper(number)
        sweeper.delete_files(())
        assert sweeper.unused_adapters(()) == [adapters[name]]
    left = {found.key for found in open_store(world.configs[0]).stored()}
    assert left == {version_key(adapter) for adapter in adapters.values()}, "full weights of no model in training go"
    world.database.close()


def test_full_weights_and_snapshots_of_the_other_engine_stay(world: World) -> None:
    versions = {
        name: old_directory(version_directory(world.state_dir, FullWeights.of(name, 1))) for name in (FIRST, SECOND)
    }
    snapshots = {name: old_directory(world.configs[0].snapshots_dir / name / "7") for name in (FIRST, SECOND)}
    world.database.write(lambda c: c.execute(update(models).values(status="closed")))
    world.sweeper(0).delete_files(())
    assert (versions[FIRST].exists(), snapshots[FIRST].exists()) == (False, False)
    assert (versions[SECOND].exists(), snapshots[SECOND].exists()) == (True, True)


def test_idle_adapters_and_expired_checkpoints_are_the_business_of_their_own_engine(world: World) -> None:
    for name in (FIRST, SECOND):
        world.add_sampler(name, 1, AdapterVersion.of(name, 1))
        world.save(name, expires_at=LONG_AGO)
    world.database.write(lambda c: c.execute(update(samplers).values(last_used_at=LONG_AGO - 24 * 3600)))
    sweeper = world.sweeper(1)
    sweeper.drop_idle()
    sweeper.unused_adapters(())
    dropped = select(samplers.c.base_model).where(samplers.c.status == "dropped")
    assert world.database.read(lambda c: c.execute(dropped).scalars().all()) == [SECOND]
    assert world.database.read(store_keys) == {f"{FIRST}/saved-{FIRST}"}


def test_adapters_of_the_comparison_at_the_start_belong_to_the_engine_that_compares(world: World) -> None:
    scopes = [FileScope(config.role, world.database) for config in world.configs]
    probes = [new_probe(config.role) for config in world.configs]
    of_one_base_model = new_probe(load_config({"state_dir": world.state_dir}).role)
    assert scopes[0].among([*probes, of_one_base_model]) == {probes[0], of_one_base_model}
    assert scopes[1].among([*probes, of_one_base_model]) == {probes[1]}


def test_each_engine_deletes_what_it_left_on_the_way_to_an_object_store(
    tmp_path: Path, new_bucket: Callable[[], Any]
) -> None:
    bucket = new_bucket()
    world = World(tmp_path, checkpoint_store=bucket.url, checkpoint_store_options=bucket.options)
    names = ["scratch", *(config.role.process("scratch") for config in world.configs)]
    of_api, of_first, of_second = (old_directory(tmp_path / name / SCRATCH) for name in names)
    world.sweeper(0).delete_files(())
    assert [path.exists() for path in (of_api, of_first, of_second)] == [False, False, True]
    world.database.close()
