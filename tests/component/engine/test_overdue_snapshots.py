"""Snapshots of models that take no steps. Without these snapshots no command of such a model could be deleted from the
log."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import NEVER_S, Harness, Killed, Trainer, data, files_in, harness_in, until
from sqlalchemy import select

from skyrl.base.types.requests import Kind, NewRequest
from skyrl.engine import snapshots as engine_snapshots
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.db import futures as rows
from skyrl.storage.db import retention
from tests.postgres_server import ON_BOTH

AT_ONCE_S = 1e-9


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """A harness in which every model is due for a snapshot as soon as it has run a command."""
    monkeypatch.setattr(engine_snapshots, "OVERDUE_S", 0.0)
    async with harness_in(tmp_path / "state", snapshot_interval_s=AT_ONCE_S) as harness:
        await harness.start()
        yield harness


async def forward(trainer: Trainer, seed: int, seq_id: int | None = None) -> dict[str, Any]:
    given = {"data": data(seed), "loss_fn": "cross_entropy"}
    return await trainer.result(await trainer.send(Kind.FORWARD, seq_id, forward_input=given))


def delete_ended_commands(harness: Harness) -> None:
    """Delete all ended commands that retention allows."""
    harness.database.write(lambda c: retention.forget(c, time.time() + 1))


def numbers(harness: Harness, model_id: str) -> list[int]:
    query = select(rows.futures.c.seq_id).where(rows.futures.c.model_id == model_id)
    return sorted(harness.database.read(lambda c: c.execute(query).scalars()))


def snapshots(harness: Harness, model_id: str) -> list[Path]:
    group = harness.config.snapshots_dir / safe_name(model_id)
    return sorted(group.iterdir()) if group.is_dir() else []


async def wait_for_snapshot(harness: Harness, trainer: Trainer) -> None:
    """Wait until a snapshot holds all that the model has run, and the earlier snapshot is deleted."""
    await until(lambda: harness.model_row(trainer.model_id).next_seq == trainer.seq_id + 1)
    await until(lambda: [path.name for path in snapshots(harness, trainer.model_id)] == [str(trainer.seq_id + 1)])


@ON_BOTH
async def test_the_bodies_of_forward_passes_are_deleted(
    tmp_path: Path, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_snapshots, "OVERDUE_S", 0.0)
    flags = {"snapshot_interval_s": AT_ONCE_S, "database_url": migrated_url}
    async with harness_in(tmp_path / "state", **flags) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        before = [await forward(trainer, seed) for seed in range(3)]
        await wait_for_snapshot(harness, trainer)
        delete_ended_commands(harness)
        assert numbers(harness, trainer.model_id) == []
        await harness.crash()
        await harness.start()
        assert [await forward(trainer, seed) for seed in range(3)] == before
        await wait_for_snapshot(harness, trainer)
        request = NewRequest(
            Kind.FORWARD, "tenant", trainer.session.id, b"{}", model_id=trainer.model_id, numbered=True
        )
        await harness.store.record(request)
        assert numbers(harness, trainer.model_id)[-1] == trainer.seq_id + 1, "the numbers continue"


async def test_an_unchanged_model_is_not_saved_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await wait_for_snapshot(harness, trainer)
    (first,) = snapshots(harness, trainer.model_id)
    contents, inodes = files_in(first), {file.name: file.stat().st_ino for file in first.iterdir()}
    state = await trainer.state()
    written: list[str] = []
    save_snapshot = harness.backend.save_snapshot

    def noting(model_id: str, directory: Path) -> None:
        written.append(model_id)
        save_snapshot(model_id, directory)

    with monkeypatch.context() as patched:
        patched.setattr(harness.backend, "save_snapshot", noting)
        await forward(trainer, 1)
        await wait_for_snapshot(harness, trainer)
        assert written == []
    (second,) = snapshots(harness, trainer.model_id)
    assert files_in(second) == contents
    assert {file.name: file.stat().st_ino for file in second.iterdir()} == inodes
    await harness.crash()
    await harness.start()
    assert await trainer.state() == state
    await forward(trainer, 2)  # also after a snapshot of an earlier engine
    await wait_for_snapshot(harness, trainer)
    assert files_in(snapshots(harness, trainer.model_id)[0]) == contents
    await trainer.step(2)
    await wait_for_snapshot(harness, trainer)
    assert files_in(snapshots(harness, trainer.model_id)[0]) != contents


async def test_a_snapshot_holds_a_gradient_that_no_step_has_used(harness: Harness, tmp_path: Path) -> None:
    async with harness_in(tmp_path / "undisturbed") as steady:
        await steady.start()
        alone = await Trainer.create(steady)
        for seed in (1, 2, 3):
            await alone.result(await alone.forward_backward(seed))
        await alone.result(await alone.optim_step())
        expected = await alone.state()
    trainer = await Trainer.create(harness)
    for seed in (1, 2, 3):
        await trainer.result(await trainer.forward_backward(seed))
        await wait_for_snapshot(harness, trainer)
        delete_ended_commands(harness)
        assert numbers(harness, trainer.model_id) == [], "the snapshot holds the gradient, so its commands may go"
        await harness.crash()
        await harness.start()
    await trainer.result(await trainer.optim_step())
    assert await trainer.state() == expected


async def test_the_bodies_of_a_gradient_without_a_snapshot_are_kept(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state", snapshot_interval_s=NEVER_S) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.result(await trainer.forward_backward(1))
        await forward(trainer, 2)
        before = await trainer.state()
        delete_ended_commands(harness)
        assert numbers(harness, trainer.model_id) == [0, 1, 2]
        await harness.crash()
        await harness.start()
        assert await trainer.state() == before


async def test_a_failed_snapshot_is_tried_later_and_stops_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await Trainer.create(harness)
    await wait_for_snapshot(harness, trainer)
    tries = 0

    def full(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(harness.backend, "save_snapshot", full)
        await trainer.result(await trainer.forward_backward(1))
        await until(lambda: tries > 1)
        assert "has no snapshot at command 2" in caplog.text
        await trainer.result(await trainer.forward_backward(2))
    await wait_for_snapshot(harness, trainer)


async def test_a_closed_or_failed_model_gets_no_snapshot(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    failed, closed = await Trainer.create(harness, rank=1000), await Trainer.create(harness)
    await failed.fails(Kind.OPTIM_STEP)
    await wait_for_snapshot(harness, closed)
    await harness.end(closed.session)
    await until(lambda: not harness.snapshots.overdue())
    await until(lambda: snapshots(harness, closed.model_id) == snapshots(harness, failed.model_id) == [])
    assert "has no snapshot" not in caplog.text


@pytest.mark.parametrize("changed", [True, False], ids=["written", "linked"])
@pytest.mark.parametrize("point", ["in the files", "before the commit", "after the commit"])
async def test_a_death_during_a_snapshot_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, changed: bool
) -> None:
    async with harness_in(tmp_path / "state", snapshot_interval_s=NEVER_S) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
        if changed:
            await trainer.result(await trainer.forward_backward(2))
        await forward(trainer, 3)
        before = await trainer.state()
        write = harness.engine_database.write

        def die(*_: Any, **__: Any) -> None:
            raise Killed

        def write_and_die(*given: Any, **options: Any) -> None:
            write(*given, **options)
            raise Killed

        with monkeypatch.context() as patched:
            if point == "in the files":
                patched.setattr(harness.backend, "save_snapshot", die)
                patched.setattr(engine_snapshots, "link_tree", die)
            else:
                patched.setattr(harness.engine_database, "write", die if "before" in point else write_and_die)
            with pytest.raises(Killed):
                await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
        delete_ended_commands(harness)
        await harness.crash()
        await harness.start()
        assert await trainer.state() == before
        assert (await trainer.step(4))["optimizer_step"] == 2
