"""With Ray, the engine puts every adapter to sample from into the checkpoint store: when it is there, which reference
replicas get, and when it goes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from adapter_world import World, world_in
from engine_harness import Harness, Killed, Trainer, files_in, harness_in, until
from fake_upstream import LOAD, Received, after, hang_up, reply
from replicas import TIMEOUTS, UNLOAD, WELL, group_of, servers

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.paths import TinkerPath, model_id_of, sampling_session_id_of
from skyrl.engine import sweeping
from skyrl.engine.publishing import adopt_adapters
from skyrl.engine.sweeping import FileSweeper
from skyrl.inference.adapter_host import AdapterMissing, AdapterUnavailable, StoredAdapters
from skyrl.inference.remote.hand_over import SEND_FILES
from skyrl.inference.remote.references import reference_to
from skyrl.inference.replica import Addresses, Replica
from skyrl.storage.checkpoint_store.base import MANIFEST, NotStored, StoreError
from skyrl.storage.checkpoint_store.held import HeldVersions
from skyrl.storage.checkpoint_store.versions import ADAPTER_FILES, version_directory, version_key
from skyrl.storage.db import checkpoints
from skyrl.storage.db.engine_state import read_state
from skyrl.storage.db.models import set_model
from skyrl.storage.db.samplers import Sampler, add_sampler, find_sampler


class TravellingWorld(World):
    """With Ray."""

    def version(self, number: int) -> AdapterVersion:
        return AdapterVersion.of(self.trainer.model_id, number)

    def files(self, number: int) -> set[str]:
        """Names of the stored files of a version; empty if it is not stored."""
        try:
            return set(self.harness.checkpoint_store.files(version_key(self.version(number))))
        except NotStored:
            return set()

    def keys(self) -> set[str]:
        return {found.key for found in self.harness.checkpoint_store.stored()}

    async def sweeps(self) -> None:
        """As many sweeps as find, unload and delete an adapter."""
        for _ in range(3):
            await self.harness.sweep()


def stored_adapters(harness: Harness) -> StoredAdapters:
    async def store_key(adapter: AdapterVersion) -> str | None:
        return await harness.database.read_async(lambda c: checkpoints.store_key_of(c, adapter))

    return StoredAdapters(harness.checkpoint_store, store_key, harness.config.state_dir)


@pytest.fixture(params=["local", "s3"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TravellingWorld]:
    for name in ("GRACE_S", "LISTING_S"):
        monkeypatch.setattr(sweeping, name, -60.0)  # so that no file is too young to be deleted
    flags = request.getfixturevalue("on_s3") if request.param == "s3" else {}
    async with world_in(tmp_path / "state", stored_adapters, ray_address="local", **flags) as world:
        yield TravellingWorld(world.harness, world.upstream, world.group, world.trainer)


async def test_an_unnamed_save_is_handed_to_replicas_while_it_is_stored_and_swept_with_its_session(
    world: TravellingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, let, seen = asyncio.Event(), threading.Event(), list[Received]()
    copy = HeldVersions.copy

    def waiting(held: HeldVersions, directory: Path) -> None:
        assert let.wait(30)
        copy(held, directory)

    async def look(request: Received, writer: asyncio.StreamWriter) -> None:
        if "held" in request.json:
            await reply(SEND_FILES, {})(request, writer)
            return
        seen.append(request)
        await after(go, WELL)(request, writer)

    monkeypatch.setattr(HeldVersions, "copy", waiting)
    world.upstream.controls[LOAD] = look
    save = await world.trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    saved = await world.trainer.result(save)
    await until(lambda: bool(seen))
    assert world.files(1) == set()
    assert world.harness.model_row(world.trainer.model_id).versions_taken == 1, "no other engine takes the number"
    let.set()
    key = version_key(world.version(1))
    await until(lambda: not world.harness.config.adapters_dir.exists())
    request = seen[0].json
    sizes = request.pop("files")
    assert request == {"lora_name": world.version(1).name, "lora_path": reference_to(key)}
    assert sizes == world.harness.checkpoint_store.files(key)
    with world.harness.checkpoint_store.reading(key) as directory:
        stored = b"".join((directory / name).read_bytes() for name in sizes)
    assert seen[0].body.partition(b"\n")[2] == stored
    go.set()
    sampler = world.harness.database.read(lambda c: find_sampler(c, saved["sampling_session_id"]))
    assert sampler is not None
    assert sampler.weights == world.version(1)

    await world.sweeps()
    assert world.files(1) == ADAPTER_FILES
    await world.harness.end(world.trainer.session)
    await world.sweeps()
    assert world.asked_for(UNLOAD) == [{"lora_name": world.version(1).name}]
    assert world.keys() == set()


async def test_a_save_that_the_store_lacks_is_stored_by_the_next_engine_and_the_next_save_waits_for_the_store(
    world: TravellingWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise StoreError("away")

    with monkeypatch.context() as patched:
        patched.setattr(world.harness.checkpoint_store, "writing", away)
        await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        held = version_directory(world.harness.config.state_dir, world.version(1))
        await until(lambda: "is in memory alone" in caplog.text)
        await world.trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
        await world.harness.crash()
    files = files_in(held)
    assert files.keys() == ADAPTER_FILES
    await world.harness.start(group=world.group)
    await world.sweeps()
    assert world.files(1) == ADAPTER_FILES
    with world.harness.checkpoint_store.reading(version_key(world.version(1))) as directory:
        assert {name: content for name, content in files_in(directory).items() if name != MANIFEST} == files
    assert not held.exists()
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=2)
    await until(lambda: world.files(3) == ADAPTER_FILES)


async def test_a_named_save_is_stored_once_and_outlives_its_checkpoint_while_it_is_sampled_from(
    world: TravellingWorld,
) -> None:
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    (row,) = world.harness.checkpoint_rows(world.trainer.model_id)
    assert world.keys() == {row.store_key} == {version_key(world.version(1))}
    assert row.size_bytes == sum(len(content) for content in world.harness.stored(row).values()) > 0
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first", overwrite=True)
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    await world.sweeps()
    assert (world.files(1), world.files(2)) == (set(), ADAPTER_FILES)

    session = await world.harness.sessions.create("tenant", [], None, "")
    await world.harness.end(world.trainer.session)
    await world.sweeps()
    assert world.keys() == {version_key(world.version(2))}
    table = checkpoints.checkpoints
    world.harness.database.write(lambda c: c.execute(table.delete()))
    await world.harness.end(session)
    await world.sweeps()
    assert world.keys() == set()


async def test_an_expired_checkpoint_takes_no_files_from_a_sampling_session(world: TravellingWorld) -> None:
    saved = await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    await until(lambda: world.files(1) == ADAPTER_FILES)
    table = checkpoints.checkpoints
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="other")
    assert saved

    def move(connection: Any) -> None:
        """The checkpoint of this sampling session's version, which expires."""
        key = version_key(world.version(1))
        values = {"weights": world.version(1), "store_key": key, "expires_at": 1.0}
        connection.execute(table.update().values(values))

    world.harness.database.write(move)
    await world.sweeps()
    assert world.harness.checkpoint_rows(world.trainer.model_id) == []
    assert world.keys() == {version_key(world.version(1))}


async def test_a_copied_checkpoint_that_is_deleted_takes_no_files_from_a_sampling_session(
    world: TravellingWorld,
) -> None:
    """Its version is not stored under a key of its own before anybody samples from it."""
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    harness, writer = world.harness, world.harness.writer
    path = TinkerPath(world.trainer.model_id, "sampler_weights", "first")
    source = harness.database.read(lambda c: checkpoints.find_checkpoint(c, path, "tenant"))
    assert source is not None
    session = await harness.sessions.create("tenant", [], None, "")
    model_id = model_id_of(session.id, 0)
    copy = checkpoints.Copy(TinkerPath(model_id, path.kind, path.name), "tenant", session.id, 0, "copied/first-1")
    harness.checkpoint_store.copy(source.store_key, copy.store_key)
    assert (await checkpoints.Copies(harness.database, writer).add(copy, source)).new
    version = AdapterVersion.of(model_id, 1)
    sampler = Sampler(sampling_session_id_of(session.id, 0), session.id, "tenant", "tiny", str(copy.path), version)
    reference = reference_to(version_key(version))
    hosts = [stored_adapters(harness) for _ in range(4)]
    assert await asyncio.gather(*(host.bring(version) for host in hosts)) == [reference] * 4
    harness.database.write(lambda c: add_sampler(c, sampler, 0))
    assert await checkpoints.Checkpoints(harness.database, writer).delete(copy.path, "tenant")
    await world.sweeps()
    assert world.keys() == {source.store_key, version_key(version)}
    assert harness.checkpoint_store.files(version_key(version)) == harness.checkpoint_store.files(source.store_key)
    assert await stored_adapters(harness).bring(version) == reference
    await harness.end(session)
    await world.sweeps()
    assert world.keys() == {source.store_key}


async def test_a_version_that_a_dead_engine_has_stored_is_never_written_again(world: TravellingWorld) -> None:
    """Nodes may have fetched the version, so the name must not get other files."""
    world.harness.kill_before_commit_of(lambda request_id: request_id == save)
    save = ""
    save = await world.trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    await world.harness.wait_until_killed(Killed)
    assert world.files(1) == ADAPTER_FILES
    await world.harness.start(group=world.group)
    await world.trainer.result(save)
    (row,) = world.harness.checkpoint_rows(world.trainer.model_id)
    assert (row.weights, row.store_key) == (world.version(2), version_key(world.version(2)))
    await world.sweeps()
    assert world.keys() == {row.store_key}
    assert world.version(1).name in [asked["lora_name"] for asked in world.asked_for(UNLOAD)]


async def test_a_version_that_is_stored_but_not_recorded_is_never_written_again(world: TravellingWorld) -> None:
    """The database was restored from a backup, and the checkpoint store was not."""
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    world.harness.database.write(set_model(world.trainer.model_id, sampler_version=0, versions_taken=0))
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="second")
    assert {row.weights for row in world.harness.checkpoint_rows(world.trainer.model_id)} == {
        world.version(1),
        world.version(2),
    }


async def test_a_save_fails_with_its_store_and_is_not_recorded(
    world: TravellingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: str) -> None:
        raise StoreError("no route to 10.0.0.7")

    with monkeypatch.context() as patched:
        patched.setattr(world.harness.checkpoint_store, "files", away)
        await world.trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    assert world.harness.model_row(world.trainer.model_id).sampler_version == 0
    await world.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
    await until(lambda: world.files(1) == ADAPTER_FILES)


async def test_adapters_of_a_server_without_ray_are_stored_when_it_starts_with_ray(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="named")
        await harness.stop()
        adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        assert harness.database.read(read_state).state_dir == str(tmp_path / "state")
        (row,) = harness.checkpoint_rows(trainer.model_id)
    async with harness_in(tmp_path / "state", ray_address="local") as harness:
        adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        assert harness.database.read(read_state).state_dir is None
        host = stored_adapters(harness)
        first, second = (AdapterVersion.of(trainer.model_id, number) for number in (1, 2))
        assert await host.bring(first) == reference_to(version_key(first))
        assert harness.checkpoint_store.files(version_key(first)).keys() == ADAPTER_FILES
        assert await host.bring(second) == reference_to(version_key(second))
        stored = harness.checkpoint_store.files
        assert stored(version_key(second)) == stored(row.store_key)


async def test_an_engine_on_another_host_with_an_empty_state_directory_has_the_adapters(
    tmp_path: Path, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)
    shared = {
        "ray_address": "local",
        "database_url": migrated_url,
        "checkpoint_store": (tmp_path / "store").as_uri(),
    }
    async with harness_in(tmp_path / "one", **shared) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        await harness.stop()
    async with harness_in(tmp_path / "other", **shared) as harness:
        adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        sweeper = FileSweeper(harness.config, harness.database, harness.checkpoint_store)
        for _ in range(2):
            assert sweeper.unused_adapters() == []
            sweeper.delete_files()
        key = version_key(AdapterVersion.of(trainer.model_id, 1))
        assert harness.checkpoint_store.files(key).keys() == ADAPTER_FILES
        assert await stored_adapters(harness).bring(AdapterVersion.of(trainer.model_id, 1)) == reference_to(key)


async def test_an_adapter_whose_checkpoint_is_gone_is_missing_and_an_unreachable_database_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness_in(tmp_path / "state") as harness:
        adapter, host = AdapterVersion.of("s1:train:0", 1), stored_adapters(harness)
        assert await host.bring(adapter) == reference_to(version_key(adapter)), "the trainer may have handed it over"

        async def deleted(_: AdapterVersion) -> str | None:
            return "deleted/checkpoint-1"

        with pytest.raises(AdapterMissing):
            await StoredAdapters(harness.checkpoint_store, deleted).bring(adapter)
        with monkeypatch.context() as patched:
            patched.setattr(harness.checkpoint_store, "files", lambda _: (_ for _ in ()).throw(StoreError("away")))
            assert await host.bring(adapter) == reference_to(version_key(adapter)), "the node may have it"

        async def failing(_: AdapterVersion) -> str | None:
            raise OSError("away")

        with pytest.raises(AdapterUnavailable):
            await StoredAdapters(harness.checkpoint_store, failing).bring(adapter)
        with harness.checkpoint_store.writing(version_key(adapter)) as directory:
            (directory / "adapter_config.json").write_text("{}")
        assert await host.bring(adapter) == reference_to(version_key(adapter))


async def test_a_hanging_replica_keeps_no_stored_files_and_is_asked_to_unload_until_it_answers(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness, servers(1) as (server,):
        a, b = (AdapterVersion.of("s1:train:0", number) for number in (1, 2))
        for adapter in (a, b):
            with harness.checkpoint_store.writing(version_key(adapter)) as directory:
                (directory / "adapter_config.json").write_text("{}")
        replica = Replica("vllm", Addresses.same(server.url), "key", stored_adapters(harness), TIMEOUTS)
        group, published = group_of(replica, watching_s=1000.0, grace_s=1000.0)
        watching = asyncio.create_task(group.run())
        await until(lambda: bool(published))
        for adapter in (a, b):
            await group.publish_adapter(adapter)
        unload = server.upstream.controls.pop(UNLOAD)
        server.upstream.controls[UNLOAD] = hang_up
        assert await group.retire([a]) == {a}
        server.upstream.controls[UNLOAD] = unload
        assert server.adapters == {a.name, b.name}
        assert await group.retire([b]) == {b}
        assert server.adapters == set()
        await group.close()
        await watching


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_a_cluster_of_several_nodes_needs_a_checkpoint_store_that_all_of_them_see(address: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_store: weights travel by it.*file:///directory"):
        load_config({"ray_address": address})
    load_config({"ray_address": address, "checkpoint_store": "file:///shared"})
    load_config({"ray_address": "local"})
