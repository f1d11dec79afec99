"""The engine dies, and the next engine recovers from the same database and files, to the last bit."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_harness import WAIT_S, Harness, Trainer, files_in, harness_in, until
from sqlalchemy import delete, select, update

from skyrl.base.types.requests import SAVES, Kind, NewRequest
from skyrl.base.wire.errors import ErrorCategory
from skyrl.engine import sweeping
from skyrl.engine.snapshots import Snapshots
from skyrl.storage.checkpoint_store.base import StoreError
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.db import futures as rows
from skyrl.storage.db import retention
from skyrl.storage.db.checkpoints import checkpoints
from tests.postgres_server import ON_BOTH


async def die_at(trainer: Trainer, kind: Kind, **body: Any) -> str:
    """The engine executes this command and dies before it stores the outcome; returns the request id."""
    trainer.harness.kill_before_commit_of(lambda _: True)
    request_id = await trainer.send(kind, **body)
    await trainer.harness.wait_until_killed()
    return request_id


async def restart(harness: Harness) -> None:
    """Every outcome is committed, no snapshot was taken at the end, and the new engine has nothing of the old one's
    memory."""
    await harness.crash()
    await harness.start()


def numbers(harness: Harness, model_id: str) -> list[int]:
    """The numbers of a model's commands that are still stored."""
    query = select(rows.futures.c.seq_id).where(rows.futures.c.model_id == model_id)
    return sorted(harness.database.read(lambda c: c.execute(query).scalars()))


async def test_a_crash_after_every_command_changes_no_bit(tmp_path: Path) -> None:
    """The engine dies after every command; snapshots are taken after every second step."""
    async with harness_in(tmp_path / "steady") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        for number in range(4):
            await trainer.step(number)
        expected = await trainer.state()
    async with harness_in(tmp_path / "crashing") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        for number in range(4):
            await harness.sessions.beat(trainer.session)  # a slow machine may take minutes
            for seed, lengths in ((number, (9, 14)), (number + 1000, ())):
                await trainer.result(await trainer.forward_backward(seed, None, *lengths))
                await restart(harness)
            await trainer.result(await trainer.optim_step())
            if number % 2:
                await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
            await restart(harness)
        assert await trainer.state() == expected


@pytest.mark.parametrize("snapshot", [True, False])
async def test_a_model_with_other_ranks_in_some_layers_comes_back_and_so_do_its_checkpoints(
    harness: Harness, snapshot: bool
) -> None:
    pattern = (("q_proj", 2), (r"0\.mlp\..*", 3), ("lm_head", 8))
    trainer = await Trainer.create(harness, rank_pattern=pattern)
    await trainer.step(0)
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="one"))["path"]
    saved = await trainer.state()
    await trainer.step(1)
    expected = await trainer.state()
    assert json.loads(expected["state.json"])["lora"]["rank_pattern"] == [list(each) for each in pattern]
    if snapshot:
        await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
    await restart(harness)
    assert await trainer.state() == expected
    (row,) = harness.checkpoint_rows(trainer.model_id)
    assert row.rank_pattern == [list(each) for each in pattern]
    await trainer.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    assert await trainer.state() == saved
    plain = await Trainer.create(harness, model_seq_id=1)
    failed = await plain.fails(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    assert "lora_config.rank_pattern: the saved adapter has rank 2 in model.layers.0" in str(failed.error)
    unknown = await Trainer.create(harness, model_seq_id=2, rank_pattern=(("q_poj", 2),))
    assert unknown.creating is not None
    refused = await unknown.outcome(unknown.creating)
    assert refused.error_category == ErrorCategory.USER
    assert "lora_config.rank_pattern: 'q_poj' matches no trained layer" in str(refused.error)


@pytest.mark.parametrize("fate", ["deleted", "replaced", "made private"])
async def test_a_loaded_checkpoint_may_be_deleted_after_the_load(harness: Harness, fate: str) -> None:
    owner, trainer = await Trainer.create(harness, tenant="owner"), await Trainer.create(harness)
    await owner.step(1)
    path = (await owner.do(Kind.SAVE_WEIGHTS, path="start"))["path"]
    harness.database.write(lambda c: c.execute(update(checkpoints).values(public=True)))
    await trainer.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    await trainer.step(2)
    before = await trainer.state()
    if fate == "deleted":
        harness.database.write(lambda c: c.execute(delete(checkpoints)))
        shutil.rmtree(harness.config.checkpoints_dir)
    elif fate == "replaced":
        await owner.step(3)
        await owner.do(Kind.SAVE_WEIGHTS, path="start", overwrite=True)
    else:
        harness.database.write(lambda c: c.execute(update(checkpoints).values(public=False)))
    await restart(harness)
    assert await trainer.state() == before


@pytest.mark.parametrize("fate", ["deleted", "expired", "replaced", "made private"])
async def test_a_load_without_a_snapshot_is_repeated_whatever_becomes_of_its_checkpoint(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    """The engine dies between a load, which was acknowledged, and its snapshot. The files stay until there is one."""
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    owner, trainer = await Trainer.create(harness, tenant="owner"), await Trainer.create(harness)
    await owner.step(1)
    path = (await owner.do(Kind.SAVE_WEIGHTS, path="start"))["path"]
    (loaded,) = harness.checkpoint_rows(owner.model_id)
    harness.database.write(lambda c: c.execute(update(checkpoints).values(public=True)))
    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "take", lambda *_: None)
        await trainer.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
        before = await trainer.state()
        if fate == "deleted":
            harness.database.write(lambda c: c.execute(delete(checkpoints)))
        elif fate == "expired":
            harness.database.write(lambda c: c.execute(update(checkpoints).values(expires_at=1.0)))
        elif fate == "replaced":
            await owner.step(3)
            await owner.do(Kind.SAVE_WEIGHTS, path="start", overwrite=True)
        else:
            harness.database.write(lambda c: c.execute(update(checkpoints).values(public=False)))
        await harness.sweep()
        await harness.crash()
    await harness.start()
    assert await trainer.state() == before
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
    await harness.sweep()
    rows_left = [row.store_key for row in harness.checkpoint_rows(owner.model_id)]
    assert [found.key for found in harness.checkpoint_store.stored()] == rows_left
    assert (loaded.store_key in rows_left) == (fate == "made private")


async def test_a_model_that_cannot_be_restored_fails_and_other_models_go_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine died between a load and its snapshot, and the checkpoint's files are gone."""
    monkeypatch.setattr(Snapshots, "take", lambda *_: None)
    saver, loader = await Trainer.create(harness), await Trainer.create(harness)
    path = (await saver.do(Kind.SAVE_WEIGHTS, path="start"))["path"]
    await loader.do(Kind.LOAD_WEIGHTS, path=path)
    (row,) = harness.checkpoint_rows(saver.model_id)
    harness.checkpoint_store.delete(row.store_key)
    await saver.step(2)
    before = await saver.state()
    await harness.crash()
    pending = await loader.forward_backward(1)
    await harness.start()
    assert harness.model_row(loader.model_id).status == "failed"
    assert f"{row.store_key} is not stored" in caplog.text
    assert "not there any more" in ((await loader.outcome(pending)).error or "")
    assert "not there any more" in ((await loader.fails(Kind.OPTIM_STEP)).error or "")
    assert await saver.state() == before
    assert (await saver.step(3))["optimizer_step"] > 1


@ON_BOTH
async def test_a_load_is_repeated_with_its_own_files_whatever_the_clocks_say(
    tmp_path: Path, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads without a snapshot. One is of a checkpoint that a machine has made whose clock is ahead. The other is
    of a checkpoint that is replaced, while ends have later times than the engine's clock says."""
    monkeypatch.setattr(Snapshots, "take", lambda *_: None)
    async with harness_in(tmp_path / "state", database_url=migrated_url) as harness:
        await harness.start()
        saver, of_kept, of_replaced = [await Trainer.create(harness) for _ in range(3)]
        await saver.step(1)
        kept, replaced = [(await saver.do(Kind.SAVE_WEIGHTS, path=name))["path"] for name in ("kept", "replaced")]
        hour, is_kept = time.time() + 3600, checkpoints.c.name == "kept"
        harness.database.write(lambda c: c.execute(update(checkpoints).where(is_kept).values(created_at=hour)))
        await of_kept.do(Kind.LOAD_WEIGHTS, path=kept)
        before = await of_kept.state()
        ended = rows.futures.c.model_id == saver.model_id
        harness.database.write(lambda c: c.execute(update(rows.futures).where(ended).values(completed_at=hour)))
        await of_replaced.do(Kind.LOAD_WEIGHTS, path=replaced)
        await saver.step(2)
        await saver.do(Kind.SAVE_WEIGHTS, path="replaced", overwrite=True)
        await restart(harness)
        assert [await of_kept.state(), await of_replaced.state()] == [before, before]


async def test_a_lost_snapshot_fails_its_model_only(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    lost, other = await Trainer.create(harness), await Trainer.create(harness)
    for trainer in (lost, other):
        await trainer.step(1)
        await harness.threads.on_backend(
            lambda trainer=trainer: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1)
        )
    await harness.crash()
    shutil.rmtree(harness.config.snapshots_dir / safe_name(lost.model_id))
    await harness.start()
    assert harness.model_row(lost.model_id).status == "failed"
    assert f"model {lost.model_id} cannot be restored" in caplog.text
    assert (await other.step(2))["optimizer_step"] == 2


@pytest.mark.parametrize("kind", sorted(SAVES))
async def test_a_save_that_was_written_but_not_recorded_is_repeated(
    harness: Harness, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    save = await die_at(trainer, kind, path="name")
    assert harness.checkpoint_rows(trainer.model_id) == []
    await harness.start()
    await trainer.result(save)
    (row,) = harness.checkpoint_rows(trainer.model_id)
    assert harness.stored(row)
    assert len(harness.checkpoint_store.stored()) == 2
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    await until(lambda: not harness.scheduler.saving)
    harness.parts.sweeper._sweep_store()
    assert [found.key for found in harness.checkpoint_store.stored()] == [row.store_key]
    if kind is Kind.SAVE_WEIGHTS_FOR_SAMPLER:
        assert files_in(harness.adapter(row.weights)) == harness.stored(row)
        directory = harness.adapter(row.weights)
        names = {path.name for path in directory.parent.iterdir()}
        assert names == {"v000001", directory.name} == {"v000001", "v000002"}, "vLLM may have loaded the first one"
        for _ in range(2):  # unload, delete
            await harness.sweep()
        assert [path.name for path in directory.parent.iterdir()] == [directory.name]


async def test_retention_keeps_the_commands_that_recovery_needs(harness: Harness) -> None:
    snapshotted, living, failed, closed = [await Trainer.create(harness, rank=r) for r in (4, 4, 1000, 4)]
    for trainer in (snapshotted, living, closed):
        await trainer.step(1)
    await failed.fails(Kind.OPTIM_STEP)
    await harness.threads.on_backend(lambda: harness.snapshots.take(snapshotted.model_id, 4))
    await snapshotted.step(2)
    pending = await snapshotted.optim_step(100)
    await harness.end(closed.session)
    await closed.fails(Kind.OPTIM_STEP)
    states = [await trainer.state() for trainer in (snapshotted, living)]
    later = time.time() + 1
    assert harness.database.write(lambda c: retention.forget(c, 0.0)) == 0, "no command is old enough"
    harness.database.write(lambda c: retention.forget(c, later))
    assert numbers(harness, snapshotted.model_id) == [4, 5, 6, 100]
    assert numbers(harness, living.model_id) == [0, 1, 2, 3]
    assert numbers(harness, failed.model_id) == []
    assert numbers(harness, closed.model_id) == []
    await restart(harness)
    assert [await trainer.state() for trainer in (snapshotted, living)] == states
    assert harness.database.read(lambda c: rows.find_settled(c, [pending])) == []


async def test_numbers_given_by_the_server_continue_after_deleted_ones(harness: Harness) -> None:
    """A number that is given twice would run as a late one and be lost in the next recovery."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, 4))
    harness.database.write(lambda c: retention.forget(c, time.time() + 1))
    assert numbers(harness, trainer.model_id) == []
    for number in (4, 5):
        session = trainer.session.id
        await harness.store.record(
            NewRequest(Kind.FORWARD, "tenant", session, b"{}", model_id=trainer.model_id, numbered=True)
        )
        assert numbers(harness, trainer.model_id)[-1] == number


async def test_an_engine_that_ends_while_retrying_a_waiting_model_leaves_it_to_the_next(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint arrives from the store after the engine's threads have ended."""
    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "take", lambda *_: None)
        saver, loader = await Trainer.create(harness), await Trainer.create(harness)
        await saver.step(1)
        path = (await saver.do(Kind.SAVE_WEIGHTS, path="start"))["path"]
        await loader.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
        before = await loader.state()
        await harness.crash()
    fetching, go, reading = threading.Event(), threading.Event(), harness.checkpoint_store.reading

    def away(_: str) -> Any:
        raise StoreError("no route to host")

    def slow(key: str) -> Any:
        fetching.set()
        assert go.wait(WAIT_S)
        return reading(key)

    with monkeypatch.context() as patched:
        patched.setattr(harness.checkpoint_store, "reading", away)
        await harness.start()
        patched.setattr(harness.checkpoint_store, "reading", slow)
        trying = asyncio.create_task(harness.recovery.retry())
        await until(fetching.is_set)
        await harness.crash()
        go.set()
        await trying
    assert harness.model_row(loader.model_id).status == "ready"
    await harness.start()
    assert await loader.state() == before


async def test_a_model_waits_for_an_unreachable_store_and_other_models_train(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine died between a load and its snapshot, and the checkpoint cannot be read for a while."""
    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "take", lambda *_: None)
        saver, loader, ended = [await Trainer.create(harness) for _ in range(3)]
        await saver.step(1)
        path = (await saver.do(Kind.SAVE_WEIGHTS, path="start"))["path"]
        for trainer in (loader, ended):
            await trainer.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
        await loader.step(2)
        before = await loader.state()
        await harness.crash()
    waiting = await loader.forward_backward(3)

    def away(_: str) -> Any:
        raise StoreError("no route to host")

    with monkeypatch.context() as patched:
        patched.setattr(harness.checkpoint_store, "reading", away)
        await harness.start()
        assert (await saver.step(2))["optimizer_step"] == 2
        await harness.recovery.retry()
        await harness.end(ended.session)
        assert harness.database.read(lambda c: rows.find_settled(c, [waiting])) == []
        assert harness.model_row(loader.model_id).status == "ready"
    await harness.recovery.retry()
    await loader.result(waiting)
    await loader.result(await loader.optim_step())
    after = await loader.state()
    await restart(harness)
    assert await loader.state() == after != before
    assert "not there any more" in ((await ended.fails(Kind.OPTIM_STEP)).error or "")
