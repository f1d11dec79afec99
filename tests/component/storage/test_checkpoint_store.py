"""Where checkpoints lie: in the state directory or on S3, with local copies of adapters; and what the sweep deletes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import ADAPTER, World, rest_path, world_in
from engine_harness import WAIT_S, Trainer, files_in, harness_in, until
from sqlalchemy import insert, select, update

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine import sweeping
from skyrl.storage.checkpoint_store.base import StoreError
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.store_ownership import claim_store, stores
from tests.databases import make_tables
from tests.local_ranks import rank_of
from tests.postgres_server import ON_SQLITE, PostgresServer


async def test_a_checkpoint_on_s3_outlives_the_state_directory_bit_for_bit(
    tmp_path: Path, on_s3: dict[str, Any]
) -> None:
    async with harness_in(tmp_path / "state", **on_s3) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        await trainer.forward_backward(7)  # a gradient that no step has used is part of the state
        path = (await trainer.do(Kind.SAVE_WEIGHTS, path="far"))["path"]
        before = await trainer.state()
        config = harness.config
        assert not config.checkpoints_dir.exists()
        assert list((config.state_dir / "scratch").iterdir()) == []
        shutil.rmtree(config.adapters_dir, ignore_errors=True)
        await trainer.result(await trainer.optim_step())
        continued = await trainer.state()
        loader = await Trainer.create(harness, session=trainer.session, model_seq_id=1, create=False)
        await loader.result(await loader.send(Kind.LOAD_WEIGHTS, 0, path=path, optimizer=True))
        assert await loader.state() == before
        await loader.result(await loader.optim_step())
        assert await loader.state() == continued
        without = await Trainer.create(harness, session=trainer.session, model_seq_id=2, create=False)
        await without.result(await without.send(Kind.LOAD_WEIGHTS, 0, path=path, optimizer=False))
        assert (await without.state())["adapter_model.safetensors"] == before["adapter_model.safetensors"]
        assert await without.step(1) != await loader.step(1)
        assert await without.state() != await loader.state()


async def test_recovery_repeats_a_load_without_a_snapshot_from_s3(
    tmp_path: Path, on_s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness_in(tmp_path / "state", **on_s3) as harness:
        await harness.start()
        saver, loader = await Trainer.create(harness), await Trainer.create(harness)
        await saver.step(1)
        path = (await saver.do(Kind.SAVE_WEIGHTS, path="far"))["path"]
        monkeypatch.setattr(harness.snapshots, "take", lambda *_: None)
        await loader.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
        before = await loader.state()
        await harness.stop()
        await harness.start()
        assert await loader.state() == before


async def test_only_named_saves_are_in_the_checkpoint_store(each_world: World) -> None:
    trainer = await each_world.trainer()
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    assert each_world.harness.checkpoint_store.stored() == []
    for kind in (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL):
        await trainer.do(kind, path="name", user_metadata={"kind": kind})
    rows = {row.kind: row for row in each_world.harness.checkpoint_rows(trainer.model_id)}
    stored = sorted(found.key for found in each_world.harness.checkpoint_store.stored())
    assert stored == sorted(row.store_key for row in rows.values())
    assert each_world.harness.stored(rows["weights"]).keys() == ADAPTER | {"state.json"}
    assert each_world.harness.stored(rows["external_weights"]).keys() == ADAPTER
    local = each_world.harness.adapter(rows["sampler_weights"].weights)
    assert each_world.harness.stored(rows["sampler_weights"]) == files_in(local)
    for kind, row in rows.items():
        assert row.size_bytes == sum(map(len, each_world.harness.stored(row).values())), kind
    assert each_world.checkpoints_counted() == 3


async def test_a_missing_local_adapter_is_fetched_for_a_sampling_session(each_world: World) -> None:
    trainer = await each_world.trainer()
    await trainer.step(1)
    path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="kept"))["path"]
    (row,) = each_world.harness.checkpoint_rows(trainer.model_id)
    before = files_in(each_world.harness.adapter(row.weights))
    assert before.keys() == ADAPTER
    shutil.rmtree(each_world.harness.config.adapters_dir)
    session = await each_world.session()
    numbers = iter(range(9))

    def wanted() -> dict[str, Any]:
        return {"session_id": session, "sampling_session_seq_id": next(numbers), "model_path": path}

    await asyncio.gather(*(each_world.post("create_sampling_session", wanted()) for _ in range(3)))
    assert files_in(each_world.harness.adapter(row.weights)) == before
    each_world.harness.checkpoint_store.delete(row.store_key)
    await each_world.post("create_sampling_session", wanted())
    shutil.rmtree(each_world.harness.config.adapters_dir)
    lost = await each_world.ask("POST", "create_sampling_session", wanted())
    assert lost.status_code == 404
    assert "not in the checkpoint store" in lost.json()["detail"]


async def test_an_unreachable_store_fails_saves_and_nothing_else(
    each_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await each_world.trainer()
    path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="kept"))["path"]
    shutil.rmtree(each_world.harness.config.adapters_dir)

    def away(*_: object) -> Any:
        raise StoreError("no route to host")

    for store in (each_world.harness.checkpoint_store, each_world.services.checkpoint_store):
        for name in ("writing", "reading", "files"):
            monkeypatch.setattr(store, name, away)
    for kind in (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_EXTERNAL, Kind.SAVE_WEIGHTS_FOR_SAMPLER):
        failed = await trainer.fails(kind, path="lost")
        assert failed.error_category == "server"
        # the address of the store is shown to the operator only
        assert failed.error == "the server's checkpoint store cannot be used now"
    assert (await trainer.step(1))["optimizer_step"] == 1
    wanted = {"session_id": await each_world.session(), "sampling_session_seq_id": 0, "model_path": path}
    answer = await each_world.ask("POST", "create_sampling_session", wanted)
    assert answer.status_code == 503
    assert set(answer.json()) == {"detail", "field", "request_id"}
    assert [row.name for row in each_world.harness.checkpoint_rows(trainer.model_id)] == ["kept"]


async def test_other_models_train_while_a_load_waits_for_its_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, loader, other = [await world.trainer() for _ in range(3)]
    await saver.step(1)
    path = (await saver.do(Kind.SAVE_WEIGHTS, path="slow"))["path"]
    store = world.harness.checkpoint_store
    reading, arrived, here = store.reading, threading.Event(), threading.Event()

    @contextlib.contextmanager
    def slowly(key: str) -> Any:
        here.set()
        assert arrived.wait(WAIT_S)
        with reading(key) as directory:
            yield directory

    monkeypatch.setattr(store, "reading", slowly)
    load = await loader.send(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    after = await loader.forward_backward(5)
    await asyncio.to_thread(here.wait, WAIT_S)
    try:
        assert (await other.step(2))["optimizer_step"] == 1
        assert await world.harness.store.wait(after, loader.session.tenant, 0.0) is None, (
            "commands of one model run in order"
        )
    finally:
        arrived.set()
    await loader.result(load)
    await loader.result(after)
    await saver.result(await saver.forward_backward(5))
    assert await loader.state() == await saver.state()


async def test_a_model_is_not_created_if_its_session_ends_during_the_load(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = await world.trainer()
    path = (await saver.do(Kind.SAVE_WEIGHTS, path="slow"))["path"]
    loader = await world.trainer(create=False)
    store = world.harness.checkpoint_store
    reading, arrived, here = store.reading, threading.Event(), threading.Event()

    @contextlib.contextmanager
    def slowly(key: str) -> Any:
        here.set()
        assert arrived.wait(WAIT_S)
        with reading(key) as directory:
            yield directory

    monkeypatch.setattr(store, "reading", slowly)
    load = await loader.send(Kind.LOAD_WEIGHTS, 0, path=path)
    await asyncio.to_thread(here.wait, WAIT_S)
    try:
        await world.harness.end(loader.session)
    finally:
        arrived.set()
    assert (await loader.outcome(load)).error is not None
    await until(lambda: not world.harness.parts.file_commands.running)
    assert set(rank_of(world.harness.backend).adapters) == {saver.model_id}


async def test_the_sweep_of_an_object_store_deletes_expired_and_unknown_files(
    tmp_path: Path, on_s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_in(tmp_path / "state", **on_s3) as world:
        trainer, store = await world.trainer(), world.harness.checkpoint_store
        for name in ("kept", "expired", "deleted"):
            await trainer.do(Kind.SAVE_WEIGHTS, path=name)
        with store.writing("nobodys/left") as directory:
            (directory / "file").write_bytes(b"x")
        expire = update(checkpoints).where(checkpoints.c.name == "expired").values(expires_at=time.time() - 1)
        world.harness.database.write(lambda c: c.execute(expire))
        assert (await world.ask("DELETE", rest_path(f"tinker://{trainer.model_id}/weights/deleted"))).status_code == 200
        listed: list[float] = []
        stored = store.stored

        def counted() -> Any:
            listed.append(time.time())
            return stored()

        monkeypatch.setattr(store, "stored", counted)

        def names() -> list[str]:
            return sorted(found.key.rpartition("/")[2].partition("-")[0] for found in stored())

        await world.harness.sweep()
        assert names() == ["deleted", "kept", "left"], (
            "expired checkpoints go at once; other files are too young to be deleted"
        )
        monkeypatch.setattr(sweeping, "LISTING_S", -60.0)
        await world.harness.sweep()
        assert names() == ["deleted", "kept", "left"]
        assert len(listed) == 1, "the store is listed once, because listing costs requests"
        world.harness.parts.sweeper._listing_due = 0.0
        await world.harness.sweep()
        assert names() == ["kept"]
        assert "checkpoint_expired" in world.events()
        assert "checkpoint_deleted" in world.events()


async def test_a_save_that_begins_during_a_sweep_keeps_its_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep takes longer than files without a row are kept. The save waits for vLLM before it writes its row."""
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)
    trainer, parts = await world.trainer(), world.harness.parts
    sweeping_now, stored, swept = threading.Event(), threading.Event(), threading.Event()

    def slow_sweep() -> None:
        sweeping_now.set()
        assert stored.wait(WAIT_S)

    def slow_vllm(_: Any) -> None:
        stored.set()
        assert swept.wait(WAIT_S)

    monkeypatch.setattr(parts.sweeper, "_delete_leftovers", slow_sweep)
    monkeypatch.setattr(parts.publisher, "publish", slow_vllm)
    sweep = asyncio.create_task(parts.sweep.once())
    await asyncio.to_thread(sweeping_now.wait, WAIT_S)
    save = await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="name")
    await sweep
    swept.set()
    await trainer.result(save)
    (row,) = world.harness.checkpoint_rows(trainer.model_id)
    assert world.harness.stored(row).keys() == ADAPTER


def test_a_checkpoint_store_belongs_to_one_database(tmp_path: Path, on_s3: dict[str, Any]) -> None:
    for store in (on_s3, {"checkpoint_store": f"file://{tmp_path}/shared"}):
        databases = []
        for number in range(2):
            config = load_config({"state_dir": tmp_path / f"{number}-{len(store)}", **store})
            database = Database(config.database)
            make_tables(database)
            databases.append((config, database))
        (one, first), (two, second) = databases
        claim_store(one, first, "server-1")
        claim_store(one, first, "server-1")
        with pytest.raises(ConfigError, match="checkpoint_store: .* belongs to another server's database"):
            claim_store(two, second, "server-2")
        claim_store(load_config({"state_dir": tmp_path / "2"}), second, "server-2")
        for _, database in databases:
            database.close()
    gone = load_config({"state_dir": tmp_path / "3", **on_s3, "checkpoint_store": "s3://no-such-bucket"})
    database = Database(gone.database)
    make_tables(database)
    with pytest.raises(ConfigError, match="^checkpoint_store: there is no bucket 'no-such-bucket' at http://[^ ]*$"):
        claim_store(gone, database, "server-3")
    database.close()


@ON_SQLITE
def test_a_store_whose_disk_is_not_mounted_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """Else saves would go to the disk below, and be hidden once the store is back."""
    shared, away = tmp_path / "shared", tmp_path / "away"
    config = load_config({"state_dir": tmp_path / "state", "checkpoint_store": f"file://{shared}"})
    with closing(Database(config.database)) as database:
        make_tables(database)
        claim_store(config, database, "server")
        shared.rename(away)
        claim_store(config, database, "server")  # it had no checkpoints
        with open_store(config).writing("model/name-1") as directory:
            (directory / "file").write_text("x")
        values = dict.fromkeys(("tenant", "model_id", "base_model", "kind", "name"), "m")
        numbers = dict.fromkeys(("lora_rank", "lora_alpha", "seed", "size_bytes", "created_at"), 1)
        flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed", "public"), True)
        row = {**values, **numbers, **flags, "store_key": "model/name-1", "weights": AdapterVersion.of("m", 1)}
        database.write(lambda c: c.execute(insert(checkpoints), row))
        claim_store(config, database, "server")
        shutil.rmtree(away)
        shared.rename(away)
        with pytest.raises(ConfigError, match=r"is empty\. This database has used it, and has 1 checkpoints: is its"):
            claim_store(config, database, "server")
        assert not shared.exists()
        away.rename(shared)
        claim_store(config, database, "server")


@ON_SQLITE
def test_an_owner_that_a_crash_left_empty_is_told_as_such(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    config = load_config({"state_dir": tmp_path / "state", "checkpoint_store": f"file://{shared}"})
    shared.mkdir()
    (shared / "skyrl-owner").touch()
    with closing(Database(config.database)) as database:
        make_tables(database)
        with pytest.raises(ConfigError, match="checkpoint_store: 'skyrl-owner' in .* is empty"):
            claim_store(config, database, "server")
        (shared / "skyrl-owner").unlink()
        claim_store(config, database, "server")


@ON_SQLITE
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_copy_of_the_database_may_not_use_the_checkpoint_store(
    tmp_path: Path, on_s3: dict[str, Any], kind: str
) -> None:
    """Such a copy would delete everything that the original has stored since, because the copy has no rows for it."""
    store = on_s3 if kind == "s3" else {"checkpoint_store": f"file://{tmp_path}/shared"}
    config = load_config({"state_dir": tmp_path / "live", "database_url": f"sqlite:///{tmp_path}/live.db", **store})
    with closing(Database(config.database)) as database:
        make_tables(database)
        claim_store(config, database, "live")
    shutil.copy(tmp_path / "live.db", tmp_path / "copy.db")
    with closing(Database(f"sqlite:///{tmp_path}/copy.db")) as copy:
        with pytest.raises(ConfigError, match=r"checkpoint_store: .* another copy of this database \(live; this"):
            claim_store(config, copy, "restored")
        claim_store(config, copy, "live")
        claim_store(load_config({"state_dir": tmp_path / "other"}), copy, "restored")


def test_servers_on_one_postgresql_database_share_its_store(tmp_path: Path, postgres: PostgresServer) -> None:
    names = [postgres.new_database() for _ in range(2)]
    config = load_config({"state_dir": tmp_path, "checkpoint_store": f"file://{tmp_path}/shared"})
    with closing(Database(postgres.url(names[0]))) as one, closing(Database(postgres.url(names[1]))) as restored:
        for database in (one, restored):
            make_tables(database)
        for server in ("first", "second"):
            claim_store(config, one, server)
        row = one.read(lambda c: c.execute(select(stores)).one())
        restored.write(lambda c: c.execute(stores.insert().values(url=row.url, owner=row.owner)))
        with pytest.raises(ConfigError, match=r"another copy of this database \(postgresql-\d+-\d+; this one is postg"):
            claim_store(config, restored, "first")
    for name in names:
        postgres.drop_database(name)
