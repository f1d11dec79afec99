"""With Ray, the engine puts each version of the full weights into the checkpoint store: which reference replicas get,
which numbers are used, and when the files go. The scripted server is a vLLM and its sidecar in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_harness import Harness, Trainer, harness_in, until
from fake_upstream import fake_upstream
from full_servers import Server
from test_full_training import FULL, World, group_on, whole_model

from skyrl.base.config.loading import load_config
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import BaseWeights, FullWeights
from skyrl.engine import sweeping
from skyrl.engine.publishing import adopt_full_weights, version_files
from skyrl.inference.remote.references import BASE_MODEL, reference_to
from skyrl.storage.checkpoint_store.versions import is_full_version, version_at, version_directory, version_key

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
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Travelling]:
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    flags = {"backend_config": FULL, "ray_address": "local"}
    async with fake_upstream() as upstream, harness_in(tmp_path / "state", **flags) as harness:
        server = Server(upstream)
        async with group_on(harness, server) as group:
            await harness.start(group=group)
            yield Travelling(harness, server, group)
            await harness.stop()


async def test_a_save_is_stored_before_replicas_get_its_reference_and_nothing_stays_on_the_engines_disk(
    world: Travelling,
) -> None:
    trainer = await whole_model(world)
    await trainer.do(SAVE, sampling_session_seq_id=0)
    version = FullWeights.of(trainer.model_id, 1)
    assert world.server.version == version.name
    assert world.server.paths == [reference_to(version_key(version))]
    assert is_full_version(world.harness.checkpoint_store.files(version_key(version)))
    assert world.directories() == []


async def test_replaced_versions_leave_the_store_and_named_ones_stay_as_long_as_their_checkpoint(
    world: Travelling,
) -> None:
    trainer = await whole_model(world)
    await trainer.do(SAVE, sampling_session_seq_id=0)
    await trainer.do(SAVE, path="kept")
    await trainer.do(SAVE, sampling_session_seq_id=1)
    assert world.stored() == ["1", "2", "3"]
    (row,) = world.harness.checkpoint_rows(trainer.model_id)
    assert row.store_key == version_key(FullWeights.of(trainer.model_id, 2)), "it is stored once"
    await world.harness.sweep()
    assert world.stored() == ["2", "3"]
    await trainer.do(SAVE, path="kept", overwrite=True)
    await world.harness.sweep()
    assert world.stored() == ["4"]
    await world.harness.end(trainer.session)
    await world.harness.sweep()
    assert world.stored() == ["4"], "the checkpoint outlives its model"


async def test_the_number_of_a_version_that_was_refused_is_not_used_again(world: Travelling) -> None:
    """Its files may be on nodes: other files under the same name would not replace them."""
    trainer = await whole_model(world)
    world.server.refuses = "v000001"
    await trainer.fails(SAVE, path="first")
    assert isinstance(world.current, BaseWeights)
    await world.harness.sweep()
    assert world.stored() == ["1"]
    await trainer.do(SAVE, sampling_session_seq_id=0)
    assert world.server.version == f"{trainer.model_id}@2"
    await world.harness.sweep()
    assert world.stored() == ["2"]


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


async def test_the_base_models_weights_come_back_by_a_name_that_each_node_resolves(world: Travelling) -> None:
    trainer = await whole_model(world)
    await trainer.do(SAVE, sampling_session_seq_id=0)
    await world.harness.end(trainer.session)
    await until(lambda: world.server.version == "default")
    assert world.server.paths[-1] == BASE_MODEL
    await world.harness.sweep()
    assert world.stored() == []


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
