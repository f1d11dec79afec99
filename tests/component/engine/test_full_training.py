"""The engine of a server for full fine-tuning: a save brings its version to the replicas before it is settled, also
through an object store; old versions go, the base model's weights come back, and a killed engine goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, files_in, harness_in, until
from fake_upstream import fake_upstream
from full_servers import Server
from replicas import group_of, replica_at

from skyrl.base.config.loading import load_config
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import BaseWeights, FullWeights
from skyrl.base.wire.errors import RequestError
from skyrl.engine import sweeping
from skyrl.engine.publishing import adopt_full_weights, version_files
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.full_weights import FullWeightsOfReplicas, VersionFiles
from skyrl.inference.remote.references import BASE_MODEL, reference_to
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.checkpoint_store.versions import is_full_version, version_at, version_directory, version_key
from skyrl.storage.db import adapter_versions, full_weights
from skyrl.storage.db.samplers import find_sampler
from tests.local_ranks import rank_of

FULL = {"trainer.full_finetuning": True}


@dataclass
class World:
    harness: Harness
    server: Server
    group: EngineGroup

    @property
    def current(self) -> BaseWeights | FullWeights:
        return self.harness.database.read(full_weights.current)

    def directories(self) -> list[str]:
        """The versions whose files are there."""
        return sorted(path.name for path in self.harness.config.full_weights_dir.glob("*/v*"))


@asynccontextmanager
async def group_on(harness: Harness, server: Server) -> AsyncIterator[EngineGroup]:
    async def wanted() -> VersionFiles:
        return version_files(harness.config, harness.database.read(full_weights.current))

    url = server.upstream.url
    group, published = group_of(replica_at(url, sidecar=url), weights=FullWeightsOfReplicas(wanted, "key"))
    watching = asyncio.create_task(group.run())
    await until(lambda: published == [url])
    yield group
    await group.close()
    await watching


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with fake_upstream() as upstream, harness_in(tmp_path / "state", backend_config=FULL) as harness:
        server = Server(upstream)
        async with group_on(harness, server) as group:
            await harness.start(group=group)
            yield World(harness, server, group)
            await harness.stop()


async def whole_model(world: World, **options: Any) -> Trainer:
    trainer = await Trainer.create(world.harness, rank=0, **options)
    await trainer.step(1)
    return trainer


async def test_a_save_brings_its_version_to_the_replicas_before_it_is_settled(world: World) -> None:
    trainer = await whole_model(world)
    world.server.waits = asyncio.Event()
    save = await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    version = FullWeights.of(trainer.model_id, 1)
    await until(lambda: world.server.calls[-1:] == [f"stage {version.name}"])
    assert (world.current, world.server.version) == (BaseWeights(), "default")
    files = files_in(version_directory(world.harness.config.state_dir, version))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    world.server.waits.set()
    saved = await trainer.result(save)
    assert (world.current, world.server.version) == (version, version.name)
    sampler = world.harness.database.read(lambda c: find_sampler(c, saved["sampling_session_id"]))
    assert sampler is not None
    assert sampler.weights == version
    stored = world.harness.database.read(lambda c: adapter_versions.unsaved_bytes(c, "tenant"))
    assert stored == {"tenant": sum(map(len, files.values()))}, "its bytes count for the tenant's quota"


async def test_a_new_version_replaces_the_one_before_and_its_files_go(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    trainer = await whole_model(world)
    first = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    named = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="kept")
    await trainer.step(2)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
    assert world.directories() == ["v000001", "v000002", "v000003"]
    await world.harness.sweep()
    assert world.directories() == ["v000003"]
    (row,) = world.harness.checkpoint_rows(trainer.model_id)
    assert {"config.json", "model.safetensors"} <= world.harness.stored(row).keys(), f"{named} has files of its own"
    with pytest.raises(full_weights.WeightsReplaced, match=r"version '.*@1' was replaced by version '.*@3'"):
        world.harness.database.read(lambda c: find_sampler(c, first["sampling_session_id"]))
    stored = world.harness.database.read(lambda c: adapter_versions.unsaved_bytes(c, "tenant"))
    assert set(stored) == {"tenant"}
    files = files_in(version_directory(world.harness.config.state_dir, FullWeights.of(trainer.model_id, 3)))
    assert stored["tenant"] == sum(map(len, files.values())), "replaced versions do not count"


async def test_a_save_fails_when_all_replicas_refuse_its_weights(world: World) -> None:
    trainer = await whole_model(world)
    world.server.refuses = "v000001"
    failed = await trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    assert failed.error_category == "server"
    assert (world.current, world.server.version, world.group.ready) == (BaseWeights(), "default", True)
    assert world.harness.checkpoint_rows(trainer.model_id) == []
    world.server.refuses = ""
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    assert world.server.version == f"{trainer.model_id}@1"


async def test_weights_that_are_not_finite_are_not_published(world: World) -> None:
    trainer = await whole_model(world)

    def break_weights() -> None:
        backend: Any = world.harness.backend
        rank_of(backend).parameters(trainer.model_id).weights["lm_head.weight"][0, 7] = float("inf")

    await world.harness.threads.on_backend(break_weights)
    failed = await trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    assert failed.error_category == "user"
    assert "NaN or infinity" in (failed.error or "")
    assert world.server.calls == ["continue"], "of the start"


async def test_the_base_models_weights_come_back_when_the_session_ends_and_the_next_model_begins_with_them(
    world: World,
) -> None:
    trainer = await whole_model(world)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    turn = full_weights.check_place("other", "stranger")
    with pytest.raises(RequestError, match="another tenant's model is being trained now") as refused:
        world.harness.database.read(turn)
    assert trainer.session.id not in str(refused.value)
    with pytest.raises(RequestError, match=f"your model '{trainer.model_id}' is being trained now"):
        world.harness.database.read(full_weights.check_place("other", "tenant"))
    await world.harness.end(trainer.session)
    world.harness.database.read(turn)
    await until(lambda: world.server.version == "default")
    second = await Trainer.create(world.harness, rank=0)
    again = (await second.state()).items()
    first = (await (await whole_model_of_its_own(world, second)).state()).items()
    assert again == first


async def whole_model_of_its_own(world: World, before: Trainer) -> Trainer:
    """A model that was not trained, after the end of another."""
    await before.step(3)
    await world.harness.end(before.session)
    return await Trainer.create(world.harness, rank=0)


async def test_a_save_of_a_model_that_ends_meanwhile_leaves_the_base_models_weights(world: World) -> None:
    trainer = await whole_model(world)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    world.server.waits = asyncio.Event()
    await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="second")
    await until(lambda: world.server.calls[-1] == f"stage {trainer.model_id}@2")
    ending = asyncio.create_task(world.harness.end(trainer.session))
    await until(lambda: isinstance(world.current, BaseWeights))
    world.server.waits.set()
    await ending
    await until(lambda: world.server.version == "default" and world.server.calls[-1] == "continue")


async def test_a_killed_engine_goes_on_with_the_same_bits_and_the_same_version(tmp_path: Path) -> None:
    """It dies between the publication of a version and its commit: the version before is wanted again, until the save
    has run once more."""
    flags = {"backend_config": FULL}
    async with fake_upstream() as upstream, harness_in(tmp_path / "state", **flags) as harness:
        server = Server(upstream)
        async with group_on(harness, server) as group:
            await harness.start(group=group)
            trainer = await whole_model(World(harness, server, group))
            await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
            await trainer.result(await trainer.forward_backward(5))
            before = await trainer.state()
            save = await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="second")
            harness.kill_before_commit_of(lambda request_id: request_id == save)
            await harness.wait_until_killed()
        assert server.version == f"{trainer.model_id}@2"
        server.calls.clear()
        async with group_on(harness, server) as group:
            assert server.version == f"{trainer.model_id}@1", "what the database says"
            await harness.start(group=group)
            await trainer.result(save)
            assert server.version == f"{trainer.model_id}@2"
            assert await trainer.state() == before
            await harness.stop()
    assert {name for name in before if name.startswith("optimizer")} == {"optimizer-00001.safetensors"}


async def test_the_base_models_weights_come_back_when_the_model_cannot_be_restored(world: World) -> None:
    trainer = await whole_model(world)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    snapshots = world.harness.snapshots
    await world.harness.threads.on_backend(lambda: snapshots.take(trainer.model_id, trainer.seq_id + 1))
    await world.harness.crash()
    shutil.rmtree(world.harness.config.snapshots_dir / safe_name(trainer.model_id))
    assert world.server.version == f"{trainer.model_id}@1"
    await world.harness.start(group=world.group)
    assert world.harness.model_row(trainer.model_id).status == "failed"
    await until(lambda: world.server.version == "default")


async def test_a_snapshot_restores_the_same_bits(tmp_path: Path) -> None:
    flags = {"backend_config": FULL, "snapshot_interval_s": 0.001}
    async with harness_in(tmp_path / "state", **flags) as harness:
        await harness.start()
        trainer = await Trainer.create(harness, rank=0)
        for step in range(3):
            await trainer.step(step)
        await trainer.result(await trainer.forward_backward(5))
        before = await trainer.state()
        assert harness.model_row(trainer.model_id).next_seq > 0
        await harness.crash()
        await harness.start()
        assert await trainer.state() == before


async def test_snapshots_that_take_long_are_taken_seldom(tmp_path: Path) -> None:
    flags = {"backend_config": FULL, "snapshot_interval_s": 0.001}
    async with harness_in(tmp_path / "state", **flags) as harness:
        await harness.start()
        trainer = await Trainer.create(harness, rank=0)
        await trainer.step(1)
        await trainer.step(2)
        await trainer.state()  # the snapshot of the step is taken before
        taken = harness.model_row(trainer.model_id).next_seq
        assert taken > 0
        harness.snapshots._took_s[trainer.model_id] = 40.0
        await trainer.step(3)
        await trainer.state()
        assert harness.model_row(trainer.model_id).next_seq == taken
        await harness.crash()


async def test_a_checkpoint_begins_a_model_whose_place_has_just_become_free(world: World) -> None:
    trainer = await whole_model(world)
    saved = await trainer.do(Kind.SAVE_WEIGHTS, path="state")
    expected = await trainer.state()
    backend: Any = world.harness.backend
    delete, dropped = backend.delete_model, asyncio.Event()
    loop = asyncio.get_running_loop()

    def late(model_id: str) -> None:
        loop.call_soon_threadsafe(dropped.set)
        delete(model_id)

    backend.delete_model = late
    ending = asyncio.create_task(world.harness.end(trainer.session))
    second = await Trainer.create(world.harness, rank=0, create=False)
    load = await second.send(Kind.LOAD_WEIGHTS, 0, path=saved["path"], optimizer=True)
    await second.result(load)
    await ending
    assert dropped.is_set()
    assert await second.state() == expected


SAVE = Kind.SAVE_WEIGHTS_FOR_SAMPLER


@dataclass
class Travelling(World):
    def stored(self) -> list[str]:
        """The names of the versions in the store, in the order of their numbers."""
        found = [version for key in self.keys() if (version := version_at(key)) is not None]
        return [version.name.rpartition("@")[2] for version in sorted(found, key=lambda each: each.number)]

    def keys(self) -> set[str]:
        return {found.key for found in self.harness.checkpoint_store.stored()}


@pytest.fixture
async def travelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Travelling]:
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    flags = {"backend_config": FULL, "ray_address": "local"}
    async with fake_upstream() as upstream, harness_in(tmp_path / "state", **flags) as harness:
        server = Server(upstream)
        async with group_on(harness, server) as group:
            await harness.start(group=group)
            yield Travelling(harness, server, group)
            await harness.stop()


async def test_a_save_is_stored_before_replicas_get_its_reference_and_nothing_stays_on_the_engines_disk(
    travelling: Travelling,
) -> None:
    trainer = await whole_model(travelling)
    await trainer.do(SAVE, sampling_session_seq_id=0)
    version = FullWeights.of(trainer.model_id, 1)
    assert travelling.server.version == version.name
    assert travelling.server.paths == [reference_to(version_key(version))]
    assert is_full_version(travelling.harness.checkpoint_store.files(version_key(version)))
    assert travelling.directories() == []


async def test_replaced_versions_leave_the_store_and_named_ones_stay_as_long_as_their_checkpoint(
    travelling: Travelling,
) -> None:
    trainer = await whole_model(travelling)
    await trainer.do(SAVE, sampling_session_seq_id=0)
    await trainer.do(SAVE, path="kept")
    await trainer.do(SAVE, sampling_session_seq_id=1)
    assert travelling.stored() == ["1", "2", "3"]
    (row,) = travelling.harness.checkpoint_rows(trainer.model_id)
    assert row.store_key == version_key(FullWeights.of(trainer.model_id, 2)), "it is stored once"
    await travelling.harness.sweep()
    assert travelling.stored() == ["2", "3"]
    await trainer.do(SAVE, path="kept", overwrite=True)
    await travelling.harness.sweep()
    assert travelling.stored() == ["4"]
    await travelling.harness.end(trainer.session)
    await travelling.harness.sweep()
    assert travelling.stored() == ["4"], "the checkpoint outlives its model"


async def test_the_number_of_a_version_that_was_refused_is_not_used_again(travelling: Travelling) -> None:
    """Its files may be on nodes: other files under the same name would not replace them."""
    trainer = await whole_model(travelling)
    travelling.server.refuses = "v000001"
    await trainer.fails(SAVE, path="first")
    assert isinstance(travelling.current, BaseWeights)
    await travelling.harness.sweep()
    assert travelling.stored() == ["1"]
    await trainer.do(SAVE, sampling_session_seq_id=0)
    assert travelling.server.version == f"{trainer.model_id}@2"
    await travelling.harness.sweep()
    assert travelling.stored() == ["2"]


async def test_an_engine_that_dies_before_the_commit_stores_its_version_under_another_number(tmp_path: Path) -> None:
    flags = {"backend_config": FULL, "ray_address": "local"}
    async with fake_upstream() as upstream:
        server = Server(upstream)
        async with harness_in(tmp_path / "state", **flags) as harness:
            async with group_on(harness, server) as group:
                await harness.start(group=group)
                trainer = await whole_model(Travelling(harness, server, group))
                save = await trainer.send(SAVE, path="first")
                harness.kill_before_commit_of(lambda request_id: request_id == save)
                await harness.wait_until_killed()
            assert server.version == f"{trainer.model_id}@1"
            async with group_on(harness, server) as group:
                await harness.start(group=group)
                await trainer.result(save)
                assert server.version == f"{trainer.model_id}@2"
                await harness.stop()


async def test_the_base_models_weights_come_back_by_a_name_that_each_node_resolves(travelling: Travelling) -> None:
    trainer = await whole_model(travelling)
    await trainer.do(SAVE, sampling_session_seq_id=0)
    await travelling.harness.end(trainer.session)
    await until(lambda: travelling.server.version == "default")
    assert travelling.server.paths[-1] == BASE_MODEL
    await travelling.harness.sweep()
    assert travelling.stored() == []


async def test_a_version_follows_its_server_to_a_ray_cluster_and_back(tmp_path: Path) -> None:
    async with fake_upstream() as upstream, harness_in(tmp_path / "state", backend_config=FULL) as harness:
        server = Server(upstream)
        async with group_on(harness, server) as group:
            await harness.start(group=group)
            trainer = await whole_model(World(harness, server, group))
            await trainer.do(SAVE, sampling_session_seq_id=0)
            await harness.stop()
        _moves(harness, trainer)


def _moves(harness: Harness, trainer: Trainer) -> None:
    version = FullWeights.of(trainer.model_id, 1)
    store, directory = harness.checkpoint_store, version_directory(harness.config.state_dir, version)
    alone, given = harness.config, {"state_dir": harness.config.state_dir, "backend_config": FULL}
    on_ray = load_config({**given, "ray_address": "local"})
    for _ in range(2):
        adopt_full_weights(on_ray, harness.database, store)
    assert store.files(version_key(version)).keys() == {path.name for path in directory.iterdir()}
    assert version_files(on_ray, version).location == reference_to(version_key(version))
    expected = {path.name: path.read_bytes() for path in directory.iterdir()}
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    for _ in range(2):
        adopt_full_weights(alone, harness.database, store)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == expected
