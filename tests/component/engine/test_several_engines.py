"""Two engines on one database, each of one base model: none touches the other's models, commands or rows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, until
from several_engines import ENTRIES, FIRST, SECOND, two_harnesses
from sqlalchemy import insert, select

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import BaseWeights, FullWeights, LoraSpec
from skyrl.engine import sweeping
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db import full_weights
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import Model, model_values, models
from skyrl.storage.db.samplers import Sampler, add_sampler, find_sampler
from skyrl.storage.db.session_ends import Ended, end_sessions
from skyrl.storage.db.tables import SessionRow
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
