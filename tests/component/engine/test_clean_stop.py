"""An engine that is told to stop snapshots all models, so that the next start repeats no command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Killed, Trainer, harness_in, until
from sqlalchemy.exc import OperationalError

from skyrl.base.types.requests import Kind
from skyrl.engine import execution, loop
from skyrl.storage.db import models as rows
from tests.engine_process import claim_for_tests


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """A harness that takes snapshots only when a test, a load or a stop asks for them."""
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        yield harness


def to_repeat(harness: Harness, *trainers: Trainer) -> list[int]:
    """For each model, how many commands the next start repeats."""
    firsts = [harness.model_row(trainer.model_id).next_seq for trainer in trainers]
    return [
        harness.database.read(lambda c, t=trainer, n=first: rows.count_executed(c, t.model_id, n))
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


async def test_a_stopped_run_goes_on_with_the_same_bits_as_one_without_a_stop(harness: Harness, tmp_path: Path) -> None:
    async with harness_in(tmp_path / "steady") as steady:
        await steady.start()
        undisturbed = await Trainer.create(steady)
        expected = [await undisturbed.step(number) for number in range(4)]
        state = await undisturbed.state()
    trainer = await Trainer.create(harness)
    seen = []
    for number in range(4):
        await trainer.result(await trainer.forward_backward(number, None, 9, 14))
        await harness.stop()
        await harness.start()
        await trainer.result(await trainer.forward_backward(number + 1000))
        seen.append((await trainer.result(await trainer.optim_step()))["metrics"])
    assert seen == expected
    assert await trainer.state() == state


async def test_commands_that_wait_at_a_stop_run_after_it_once(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    late = await trainer.optim_step(5)  # number 4 has not arrived
    await harness.queued(1)
    await harness.stop()
    assert to_repeat(harness, trainer) == [0]
    await harness.start()
    await trainer.forward_backward(2, 4)
    assert (await trainer.result(late))["metrics"]["optimizer_step"] == 2


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


@pytest.mark.parametrize("point", ["before the files", "after the files", "after the row"])
async def test_a_kill_in_the_last_snapshot_loses_nothing(
    harness: Harness, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = await three(harness)
    before = [await trainer.state() for trainer in trainers]
    victim = trainers[1].model_id
    write, save = harness.snapshots._write, harness.backend.save_snapshot

    def die_in_the_files(model_id: str, directory: Path) -> None:
        save(model_id, directory)
        if model_id == victim:
            raise Killed

    def die_around(model_id: str, *rest: Any) -> None:
        if model_id == victim and point == "before the files":
            raise Killed
        write(model_id, *rest)
        if model_id == victim:
            raise Killed

    with monkeypatch.context() as patched:
        if point == "after the files":
            patched.setattr(harness.backend, "save_snapshot", die_in_the_files)
        else:
            patched.setattr(harness.snapshots, "_write", die_around)
        harness.parts.signals.stop()
        await harness.wait_until_killed()
    await harness.start()
    assert [await trainer.state() for trainer in trainers] == before


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
