"""Several engines on one database and one state directory: each runs, ends and deletes what is its own."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, until
from several_engines import ENTRIES, FIRST, SECOND, two_harnesses
from sqlalchemy import insert, select, update

from skyrl.base.config.loading import load_config
from skyrl.base.config.several import base_models_of
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights, LoraSpec, WeightsRef
from skyrl.base.wire.paths import TinkerPath
from skyrl.engine import sweeping
from skyrl.engine.file_scope import FileScope, new_probe
from skyrl.engine.sweeping import FileSweeper
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory, version_key
from skyrl.storage.db import full_weights
from skyrl.storage.db.adapter_versions import NEWEST, samplers
from skyrl.storage.db.checkpoints import Checkpoint, checkpoints, put
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import Model, model_values, models
from skyrl.storage.db.samplers import Sampler, add_sampler, find_sampler
from skyrl.storage.db.session_ends import Ended, end_sessions
from skyrl.storage.db.tables import SessionRow
from tests.databases import make_tables
from tests.postgres_server import ON_BOTH


@pytest.fixture
async def both(tmp_path: Path, migrated_url: str) -> AsyncIterator[tuple[Harness, Harness]]:
    async with two_harnesses(tmp_path / "state", database_url=migrated_url) as harnesses:
        yield harnesses


def status(harness: Harness, request_id: str) -> str:
    query = select(futures.c.status).where(futures.c.id == request_id)
    return harness.database.read(lambda c: c.execute(query).scalar_one())


@ON_BOTH
async def test_each_engine_runs_the_commands_of_its_own_models(both: tuple[Harness, Harness]) -> None:
    first, second = both
    await first.start()
    mine, other = await Trainer.create(first), await Trainer.create(second)
    theirs = await other.send_step(1)
    await mine.step(1)
    await first.parts.log.read()
    assert first.scheduler.model_ids == {mine.model_id}
    assert status(second, theirs) == "pending"
    await second.start()
    await other.result(theirs)
    assert second.scheduler.model_ids == {other.model_id}
    assert await mine.state() == await other.state(), "the same seeds, data and base model"


@ON_BOTH
async def test_an_engine_that_dies_leaves_the_other_alone_and_recovers_its_own_models(
    both: tuple[Harness, Harness],
) -> None:
    first, second = both
    for harness in both:
        await harness.start()
    mine, other = await Trainer.create(first), await Trainer.create(second)
    for each in (mine, other):
        await each.step(1)
    second.kill_before_commit_of(lambda _: True)
    lost = await other.send_step(2)
    await second.wait_until_killed()
    await mine.step(2)
    await first.crash()
    await first.start()
    assert first.scheduler.model_ids == {mine.model_id}
    await mine.step(3)
    assert status(second, lost) == "pending"
    await second.start()
    await other.result(lost)
    await other.step(3)
    assert second.scheduler.model_ids == {other.model_id}
    assert await mine.state() == await other.state()


@ON_BOTH
async def test_a_session_with_models_of_two_base_models_ends_at_both_engines(both: tuple[Harness, Harness]) -> None:
    for harness in both:
        await harness.start()
    session = await both[0].sessions.create("tenant", [], None, "")
    trainers = [await Trainer.create(each, session=session, model_seq_id=n) for n, each in enumerate(both)]
    for trainer in trainers:
        await trainer.step(1)
    waiting = [await trainer.optim_step(99) for trainer in trainers]
    await both[0].end(session)
    for trainer, request_id in zip(trainers, waiting, strict=True):
        assert "the session has ended" in ((await trainer.outcome(request_id)).error or "")
        await until(lambda trainer=trainer: trainer.model_id not in trainer.harness.scheduler.model_ids)


def add_ended_session(database: Database, number: int) -> dict[str, str]:
    """A session that has ended, with an open model of each base model and its command, and with a sampling session and
    its sample. Returns the base models' names by the ids of the commands."""
    session = f"s{number}"
    row = {"id": session, "tenant": "t", "status": "finished", "created_at": 0.0, "heartbeat_at": 0.0, "ended_at": 1.0}
    request = {"tenant": "t", "session_id": session, "digest": b"", "body_format": "json", "status": "pending"}
    request |= {"created_at": 0.0}

    def add(connection: Any) -> None:
        connection.execute(insert(SessionRow), row | {"sdk_version": "", "tags": []})
        for n, name in enumerate((FIRST, SECOND)):
            model = Model(f"{session}:{name}", session, "t", name, LoraSpec(4, 8.0, 1), None)
            connection.execute(insert(models), model_values(model, n, "ready"))
            command = request | {"id": f"{session}/{name}", "kind": "OPTIM_STEP", "model_id": model.id, "seq_id": 1}
            connection.execute(insert(futures), command)
        add_sampler(connection, Sampler(f"{session}:sample", session, "t", SECOND, None, BaseWeights()), 0)
        sample = request | {"id": f"{session}/sample", "kind": "EXTERNAL", "sampling_session_id": f"{session}:sample"}
        connection.execute(insert(futures), sample)

    database.write(add)
    return {f"{session}/{name}": name for name in (FIRST, SECOND)}


@ON_BOTH
async def test_two_engines_end_the_same_sessions_at_once(both: tuple[Harness, Harness]) -> None:
    count = 30
    commands: dict[str, str] = {}
    for number in range(count):
        commands |= add_ended_session(both[0].database, number)
    begin = threading.Barrier(2)

    def end(harness: Harness) -> Ended:
        begin.wait()
        with closing(Database(harness.config.database)) as database:
            return end_sessions(database, harness.config.role.scope)

    with ThreadPoolExecutor(2) as threads:
        ended = await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(threads, end, each) for each in both))
    for name, found in zip((FIRST, SECOND), ended, strict=True):
        assert sorted(found.model_ids) == sorted(f"s{number}:{name}" for number in range(count))
        own_commands = {request_id for request_id in found.request_ids if not request_id.endswith("sample")}
        assert own_commands == {request_id for request_id, base_model in commands.items() if base_model == name}
    settled = sorted(request_id for found in ended for request_id in found.request_ids)
    assert settled == sorted([*commands, *(f"s{number}/sample" for number in range(count))]), "each once"
    open_sessions = select(samplers.c.id).where(samplers.c.status == "active")
    assert both[0].database.read(lambda c: c.execute(open_sessions).all()) == []


async def test_models_of_a_base_model_that_is_not_trained_any_more_fail_with_the_reason(tmp_path: Path) -> None:
    async with two_harnesses(tmp_path / "state") as (_, second):
        await second.start()
        trainer = await Trainer.create(second)
        await trainer.step(1)
        await second.stop()
        waiting = await trainer.send_step(2)
    sampled_only = [ENTRIES[0], ENTRIES[1] | {"uses": ["sample"]}]
    async with two_harnesses(tmp_path / "state", base_models=sampled_only) as (first, _):
        stranger = Trainer(first, trainer.session, trainer.model_id, trainer.seq_id)
        mine = await Trainer.create(first)
        await first.start()
        failed = await stranger.outcome(waiting)
        sentence = (
            f"model '{trainer.model_id}' cannot go on: this server does not train its base model 'second' any more"
        )
        assert sentence in (failed.error or "")
        assert failed.error_category == "user"
        assert first.model_row(trainer.model_id).status == "failed"
        assert first.scheduler.model_ids == {mine.model_id}
        await mine.step(1)
        assert "not there any more" in ((await stranger.outcome(await stranger.optim_step())).error or "")


async def test_a_checkpoint_of_another_base_model_is_not_loaded_although_its_shapes_fit(
    both: tuple[Harness, Harness],
) -> None:
    first, second = both
    for harness in both:
        await harness.start()
    mine, other = await Trainer.create(first), await Trainer.create(second)
    await mine.step(1)
    path = (await mine.do(Kind.SAVE_WEIGHTS, path="saved"))["path"]
    before = await other.state()
    refused = await other.fails(Kind.LOAD_WEIGHTS, path=path)
    assert refused.error_category == "user"
    for name in (path, "'first'", "'second'", other.model_id):
        assert name in (refused.error or "")
    assert await other.state() == before
    again = await Trainer.create(first)
    await again.state()
    await again.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    assert await again.state() == await mine.state()


async def test_each_base_model_trains_a_whole_model_and_keeps_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    whole = {"backend_config": {"trainer.full_finetuning": True}}
    async with two_harnesses(tmp_path / "state", **whole) as both:
        trainers = []
        for harness in both:
            await harness.start()
            trainers.append(await Trainer.create(harness, rank=0))
            await trainers[-1].step(1)
        saved = [await each.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0) for each in trainers]
        await trainers[0].do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
        await both[0].sweep()
        now = [FullWeights.of(trainers[0].model_id, 2), FullWeights.of(trainers[1].model_id, 1)]
        for harness, version in zip(both, now, strict=True):
            own = harness.config.role.own
            assert harness.database.read(lambda c, own=own: full_weights.current(c, own)) == version
            assert version_directory(harness.config.state_dir, version).is_dir()
        assert not version_directory(both[0].config.state_dir, FullWeights.of(trainers[0].model_id, 1)).exists()
        other = both[1].database.read(lambda c: find_sampler(c, saved[1]["sampling_session_id"]))
        assert other is not None
        assert other.weights == now[1]


async def test_a_load_that_would_make_a_model_of_another_base_model_makes_none(both: tuple[Harness, Harness]) -> None:
    first, second = both
    for harness in both:
        await harness.start()
    mine = await Trainer.create(first)
    path = (await mine.do(Kind.SAVE_WEIGHTS, path="saved"))["path"]
    new = await Trainer.create(second, create=False)
    refused = await new.outcome(await new.send(Kind.LOAD_WEIGHTS, 0, path=path))
    assert "'first'" in json.dumps(refused.error)
    assert second.model_row(new.model_id).status == "failed"


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
    world.sweeper(1).delete_files()
    assert not any(path.exists() for path in written[SECOND])
    assert all(path.exists() for name in (FIRST, UNKNOWN) for path in written[name])
    again = [old_directory(path) for path in written[SECOND]]
    world.sweeper(0).delete_files()
    assert not any(path.exists() for name in (FIRST, UNKNOWN) for path in written[name])
    assert all(path.exists() for path in again)


def test_adapters_without_a_row_are_unloaded_and_deleted_by_the_engine_of_their_model(world: World) -> None:
    """vLLM dies if the files of an evicted adapter are gone, and only the engine of its base model knows its vLLM."""
    versions = {name: AdapterVersion.of(name, 1) for name in (FIRST, SECOND, UNKNOWN)}
    for adapter in versions.values():
        old_directory(version_directory(world.state_dir, adapter))
    assert world.sweeper(0).unused_adapters() == [versions[FIRST], versions[UNKNOWN]]
    assert world.sweeper(1).unused_adapters() == [versions[SECOND]]


def test_stored_keys_without_a_row_are_deleted_by_the_engine_of_their_model(world: World) -> None:
    keys = {name: world.store(f"{name}/nobodys-1") for name in (FIRST, SECOND, UNKNOWN)}
    kept = {world.save(FIRST, expires_at=None), world.save(SECOND, expires_at=None)}
    world.sweeper(1).delete_files()
    assert {found.key for found in open_store(world.configs[0]).stored()} == kept | {keys[FIRST], keys[UNKNOWN]}
    world.sweeper(0).delete_files()
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
        sweeper.delete_files()
        assert sweeper.unused_adapters() == [adapters[name]]
    left = {found.key for found in open_store(world.configs[0]).stored()}
    assert left == {version_key(adapter) for adapter in adapters.values()}, "full weights of no model in training go"
    world.database.close()


def test_full_weights_and_snapshots_of_the_other_engine_stay(world: World) -> None:
    versions = {
        name: old_directory(version_directory(world.state_dir, FullWeights.of(name, 1))) for name in (FIRST, SECOND)
    }
    snapshots = {name: old_directory(world.configs[0].snapshots_dir / name / "7") for name in (FIRST, SECOND)}
    world.database.write(lambda c: c.execute(update(models).values(status="closed")))
    world.sweeper(0).delete_files()
    assert (versions[FIRST].exists(), snapshots[FIRST].exists()) == (False, False)
    assert (versions[SECOND].exists(), snapshots[SECOND].exists()) == (True, True)


def test_idle_adapters_and_expired_checkpoints_are_the_business_of_their_own_engine(world: World) -> None:
    for name in (FIRST, SECOND):
        world.add_sampler(name, 1, AdapterVersion.of(name, 1))
        world.save(name, expires_at=LONG_AGO)
    world.database.write(lambda c: c.execute(update(samplers).values(last_used_at=LONG_AGO - 24 * 3600)))
    sweeper = world.sweeper(1)
    sweeper.drop_idle()
    sweeper.unused_adapters()
    dropped = select(samplers.c.base_model).where(samplers.c.status == "dropped")
    assert world.database.read(lambda c: c.execute(dropped).scalars().all()) == [SECOND]
    keys = select(checkpoints.c.store_key)
    assert world.database.read(lambda c: c.execute(keys).scalars().all()) == [f"{FIRST}/saved-{FIRST}"]


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
    world.sweeper(0).delete_files()
    assert [path.exists() for path in (of_api, of_first, of_second)] == [False, False, True]
    world.database.close()
