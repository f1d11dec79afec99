"""Snapshots: of models that take no steps, without which none of their commands could be deleted from the log; of all
models at a stop, so that the next start repeats no command; and those of an earlier version."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, data, files_in, harness_in, until
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.types.weights import LoraSpec
from skyrl.base.wire.paths import model_id_of
from skyrl.engine import execution, loop
from skyrl.engine import snapshots as engine_snapshots
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.db import futures as rows
from skyrl.storage.db import models as model_rows
from skyrl.storage.db import retention
from skyrl.storage.db.models import Model, models
from tests.engine_process import claim_for_tests
from tests.postgres_server import ON_BOTH

AT_ONCE_S = 1e-9


@pytest.fixture
async def due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """A harness in which every model is due for a snapshot as soon as it has run a command."""
    monkeypatch.setattr(engine_snapshots, "OVERDUE_S", 0.0)
    async with harness_in(tmp_path / "state", snapshot_interval_s=AT_ONCE_S) as due:
        await due.start()
        yield due


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
    async with harness_in(tmp_path / "state", **flags) as due:
        await due.start()
        trainer = await Trainer.create(due)
        before = [await forward(trainer, seed) for seed in range(3)]
        await wait_for_snapshot(due, trainer)
        delete_ended_commands(due)
        assert numbers(due, trainer.model_id) == []
        await due.crash()
        await due.start()
        assert [await forward(trainer, seed) for seed in range(3)] == before
        await wait_for_snapshot(due, trainer)
        request = NewRequest(
            Kind.FORWARD, "tenant", trainer.session.id, b"{}", model_id=trainer.model_id, numbered=True
        )
        await due.store.record(request)
        assert numbers(due, trainer.model_id)[-1] == trainer.seq_id + 1, "the numbers continue"


async def test_commands_that_failed_without_a_run_are_deleted(due: Harness) -> None:
    trainer = await Trainer.create(due)
    await trainer.step(1)
    await wait_for_snapshot(due, trainer)
    due.parts.log._gaps.timeout_s = 0.05
    trainer.seq_id = 5
    failed = await trainer.forward_backward(2, 5)
    assert "command 4 of this model has not arrived" in ((await trainer.outcome(failed)).error or "")
    await wait_for_snapshot(due, trainer)
    delete_ended_commands(due)
    assert numbers(due, trainer.model_id) == []


async def test_a_failed_command_before_a_restart_is_deleted(due: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not repeated, and the model has no other command that a snapshot lacks."""
    trainer = await Trainer.create(due)
    await trainer.step(1)
    await wait_for_snapshot(due, trainer)
    state = await trainer.state()
    with monkeypatch.context() as patched:
        patched.setattr(engine_snapshots, "OVERDUE_S", 3600.0)
        await trainer.fails(Kind.SAVE_WEIGHTS, path="/")
        await due.crash()
    await due.start()
    await wait_for_snapshot(due, trainer)
    delete_ended_commands(due)
    assert numbers(due, trainer.model_id) == []
    await due.crash()
    await due.start()
    assert await trainer.state() == state


async def test_an_unchanged_model_is_not_saved_again(due: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await Trainer.create(due)
    await trainer.step(1)
    await wait_for_snapshot(due, trainer)
    (first,) = snapshots(due, trainer.model_id)
    contents, inodes = files_in(first), {file.name: file.stat().st_ino for file in first.iterdir()}
    state = await trainer.state()
    written: list[str] = []
    save_snapshot = due.backend.save_snapshot

    def noting(model_id: str, directory: Path) -> None:
        written.append(model_id)
        save_snapshot(model_id, directory)

    with monkeypatch.context() as patched:
        patched.setattr(due.backend, "save_snapshot", noting)
        await forward(trainer, 1)
        await wait_for_snapshot(due, trainer)
        assert written == []
    (second,) = snapshots(due, trainer.model_id)
    assert files_in(second) == contents
    assert {file.name: file.stat().st_ino for file in second.iterdir()} == inodes
    await due.crash()
    await due.start()
    assert await trainer.state() == state
    await forward(trainer, 2)  # also after a snapshot of an earlier engine
    await wait_for_snapshot(due, trainer)
    assert files_in(snapshots(due, trainer.model_id)[0]) == contents
    await trainer.step(2)
    await wait_for_snapshot(due, trainer)
    assert files_in(snapshots(due, trainer.model_id)[0]) != contents


async def test_a_snapshot_holds_a_gradient_that_no_step_has_used(due: Harness, tmp_path: Path) -> None:
    async with harness_in(tmp_path / "undisturbed") as steady:
        await steady.start()
        alone = await Trainer.create(steady)
        for seed in (1, 2, 3):
            await alone.result(await alone.forward_backward(seed))
        await alone.result(await alone.optim_step())
        expected = await alone.state()
    trainer = await Trainer.create(due)
    for seed in (1, 2, 3):
        await trainer.result(await trainer.forward_backward(seed))
        await wait_for_snapshot(due, trainer)
        delete_ended_commands(due)
        assert numbers(due, trainer.model_id) == [], "the snapshot holds the gradient, so its commands may go"
        await due.crash()
        await due.start()
    await trainer.result(await trainer.optim_step())
    assert await trainer.state() == expected


async def test_a_value_head_is_restored_from_a_snapshot_and_from_the_command_log(due: Harness) -> None:
    trainer = await Trainer.create(due, value_head=True)
    tensors = {"target_tokens": ("int64", [2, 3, 4]), "mask": ("int64", [0, 1, 1])}
    tensors |= {name: ("float32", [0.0, 0.5, 1.0]) for name in ("logprobs", "values", "rewards")}
    inputs = {name: {"data": array, "dtype": dtype, "shape": [3]} for name, (dtype, array) in tensors.items()}
    given = {"data": [{"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": inputs}], "loss_fn": "ppo"}

    async def step() -> dict[str, Any]:
        passed = await trainer.do(Kind.FORWARD_BACKWARD, forward_backward_input=given)
        await trainer.result(await trainer.optim_step())
        return passed

    first = await step()
    assert first["loss_fn_outputs"][0]["values"]["data"] == [0.0] * 3
    await wait_for_snapshot(due, trainer)
    await step()
    state = await trainer.state()
    assert "value_head.safetensors" in state
    await due.crash()
    await due.start()
    assert await trainer.state() == state


async def test_a_snapshot_deletes_only_older_ones_of_its_model(due: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this engine was suspended, another one may have taken its claim, and snapshots with later numbers."""
    trainer = await Trainer.create(due)
    await trainer.step(1)
    await wait_for_snapshot(due, trainer)
    (old,) = snapshots(due, trainer.model_id)
    others, write = [old.parent / "2000", old.parent / ".tmp-0123456789abcdef"], due.engine_database.write

    def suspended(*arguments: Any, **options: Any) -> Any:
        done = write(*arguments, **options)
        if options.get("power_safe"):
            for each in others:
                each.mkdir(exist_ok=True)
        return done

    monkeypatch.setattr(due.engine_database, "write", suspended)
    await trainer.step(2)
    await until(lambda: not old.exists())
    assert all(each.exists() for each in others)


async def test_a_failed_snapshot_is_tried_later_and_stops_nothing(
    due: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await Trainer.create(due)
    await wait_for_snapshot(due, trainer)
    tries = 0

    def full(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(due.backend, "save_snapshot", full)
        await trainer.result(await trainer.forward_backward(1))
        await until(lambda: tries > 1)
        assert "has no snapshot at command 2" in caplog.text
        await trainer.result(await trainer.forward_backward(2))
    await wait_for_snapshot(due, trainer)


async def test_a_snapshot_that_fails_is_not_tried_again_after_each_step(due: Harness) -> None:
    """Each try may fill the disk, which others need."""
    trainer, tries = await Trainer.create(due), 0
    await wait_for_snapshot(due, trainer)

    def full(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    due.backend.save_snapshot = full
    due.snapshots._interval_s = 1000.0
    due.snapshots._taken_at[trainer.model_id] -= 2000.0
    for seed in range(3):
        await trainer.step(seed)
    assert tries == 1


async def test_a_closed_or_failed_model_gets_no_snapshot(due: Harness, caplog: pytest.LogCaptureFixture) -> None:
    failed, closed = await Trainer.create(due, rank=1000), await Trainer.create(due)
    await failed.fails(Kind.OPTIM_STEP)
    await wait_for_snapshot(due, closed)
    await due.end(closed.session)
    await until(lambda: not due.snapshots.overdue())
    await until(lambda: snapshots(due, closed.model_id) == snapshots(due, failed.model_id) == [])
    assert "has no snapshot" not in caplog.text


def to_repeat(harness: Harness, *trainers: Trainer) -> list[int]:
    """For each model, how many commands the next start repeats."""
    firsts = [harness.model_row(trainer.model_id).next_seq for trainer in trainers]
    return [
        harness.database.read(lambda c, t=trainer, n=first: model_rows.count_executed(c, t.model_id, n))
        for trainer, first in zip(trainers, firsts, strict=True)
    ]


async def three(harness: Harness) -> list[Trainer]:
    """A model that has stepped, one with a gradient, and a new one."""
    trainers = [await Trainer.create(harness, seed=seed) for seed in (1, 2, 3)]
    for trainer in trainers[:2]:
        await trainer.step(1)
    await trainers[1].result(await trainers[1].forward_backward(2))
    return trainers


async def test_after_a_stop_nothing_is_repeated_and_all_bits_are_as_before(harness: Harness) -> None:
    trainers = await three(harness)
    before = [await trainer.state() for trainer in trainers]
    await harness.stop()
    assert to_repeat(harness, *trainers) == [0, 0, 0]

    def none_runs(harness: Harness) -> None:
        def refuse(*_: Any) -> None:
            raise AssertionError("a command is repeated")

        for name in ("run", "optim_step", "create_model", "load_state"):
            setattr(harness.backend, name, refuse)

    await harness.start(none_runs)
    assert [await trainer.state() for trainer in trainers] == before


async def test_a_stop_with_a_command_that_is_not_settled_takes_no_snapshot_behind_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome of a save cannot be stored while the engine ends. The next engine runs the save again."""
    trainer, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for each in (trainer, other):
        await each.step(1)
    signals, event_loop = harness.parts.signals, asyncio.get_running_loop()

    def stop_and_fail(*_: Any, **__: Any) -> None:
        event_loop.call_soon_threadsafe(signals.stop)
        raise OperationalError("a write", None, Exception("the disk is away"))

    monkeypatch.setattr(harness.parts.settlement, "settle", stop_and_fail)
    save = await trainer.send(Kind.SAVE_WEIGHTS, path="name")
    await until(lambda: signals.is_stopped)
    await harness.stop()
    assert to_repeat(harness, trainer, other) == [4, 0]
    await harness.start()
    await trainer.result(save)
    assert [row.name for row in harness.checkpoint_rows(trainer.model_id)] == ["name"]


async def test_a_snapshot_that_would_not_end_in_time_is_left_out(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, quick = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for trainer in (slow, quick):
        await trainer.step(1)
    before = [await trainer.state() for trainer in (slow, quick)]
    harness.snapshots._took_s[slow.model_id] = harness.config.stop_grace_s
    await harness.stop()
    assert to_repeat(harness, slow, quick) == [4, 0]
    assert f"model {slow.model_id} has no last snapshot: there was no time (stop_grace_s)" in caplog.text
    await harness.start()
    assert [await trainer.state() for trainer in (slow, quick)] == before
    monkeypatch.setattr(loop, "EXIT_S", harness.config.stop_grace_s + 1)
    await slow.step(2)
    await harness.stop()
    assert to_repeat(harness, slow, quick) == [7, 0]


async def test_a_stop_while_the_database_is_away_or_the_claim_is_lost_writes_no_snapshot(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)

    def away() -> None:
        raise OperationalError("a read", None, Exception("no route"))

    with monkeypatch.context() as patched:
        patched.setattr(harness.engine_database, "confirm_claim", away)
        await harness.stop()
    assert "have no last snapshot: the database cannot be used" in caplog.text
    await harness.start()
    await trainer.step(2)
    claim_for_tests(harness.database, "another server")
    harness.parts.signals.stop()
    await harness.wait_until_killed(by=execution.Displaced)
    assert not list(harness.config.snapshots_dir.glob("*/*"))


OLD = Path(__file__).parents[1] / "snapshot_format_2"
TENSORS = ("adapter_model.safetensors", "optimizer.safetensors", "state.json")


async def left_by_an_earlier_version(harness: Harness) -> Trainer:
    """The row and the snapshot of a model, as the earlier version left them."""
    session = await harness.sessions.create("tenant", [], None, "")
    adapter = LoraSpec(1, 32.0, 1, train_attn=False, train_mlp=False, train_unembed=True)
    model = Model(model_id_of(session.id, 0), session.id, "tenant", "tiny", adapter, None)
    await harness.models.create(model, 0)
    restorable = update(models).where(models.c.id == model.id).values(status="ready", next_seq=8)
    harness.database.write(lambda c: c.execute(restorable))
    directory = harness.config.snapshots_dir / model.id.replace(":", "=3A") / "8"
    shutil.copytree(OLD, directory)
    return Trainer(harness, session, model.id, seq_id=7)


async def test_a_model_goes_on_from_a_snapshot_of_an_earlier_version(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness:
        trainer = await left_by_an_earlier_version(harness)
        await harness.start()
        restored = await trainer.state()
        assert {name: restored[name] for name in TENSORS} == {name: files_in(OLD)[name] for name in TENSORS}
        assert (await trainer.result(await trainer.optim_step()))["metrics"]["optimizer_step"] == 3


async def test_a_checkpoint_of_such_a_model_can_be_downloaded(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness:
        trainer = await left_by_an_earlier_version(harness)
        await harness.start()
        await trainer.do(Kind.SAVE_WEIGHTS, path="name")
        (row,) = harness.checkpoint_rows(trainer.model_id)
        assert set(harness.stored(row)) == {*TENSORS, "adapter_config.json"}
