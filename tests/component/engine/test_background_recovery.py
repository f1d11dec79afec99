"""Models are restored in the background: other models' commands run meanwhile, and models of clients that are gone wait
until their clients come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_harness import WAIT_S, Harness, Killed, Trainer, harness_in, until
from sqlalchemy import update

from skyrl.base.types.requests import Kind
from skyrl.engine import recovery
from skyrl.engine.build import EngineParts
from skyrl.storage.db.repeats import repeat
from skyrl.storage.db.sessions import sessions
from tests.local_ranks import rank_of

LONG_AGO_S = 10 * recovery.GONE_S


class SlowRepeats:
    """Holds the engine at each command that is repeated for one model, until the test allows one."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.begun = 0
        self.has_begun = False
        self.allowed = threading.Semaphore(0)

    def __call__(self, harness: Harness) -> None:
        repeat_one = harness.recovery.restoring._repeat

        def slow(executed: Any, model: Any, loaded: Any) -> None:
            repeat_one(executed, model, loaded)
            if model.id == self.trainer.model_id:
                self.begun += 1

        alone = harness.recovery.restoring._alone

        async def slowly(model_id: str, work: Any) -> None:
            if model_id == self.trainer.model_id and self.has_begun:
                assert await asyncio.to_thread(self.allowed.acquire, timeout=WAIT_S)
            self.has_begun |= model_id == self.trainer.model_id  # the first call loads the snapshot, if there is one
            await alone(model_id, work)

        harness.recovery.restoring._repeat = slow  # type: ignore[method-assign]
        harness.recovery.restoring._alone = slowly  # type: ignore[method-assign]


async def in_background(parts: EngineParts) -> None:
    """As the engine process runs it: the loop beside the restoration."""
    restoring = asyncio.create_task(repeat("restoring models", 0.01, parts.recovery.restore_wanted, at_once=True))
    running = asyncio.create_task(parts.engine.run())
    try:
        await asyncio.wait({restoring, running}, return_when=asyncio.FIRST_COMPLETED)
        if restoring.done() and (died := restoring.exception()) is not None:
            parts.signals.fail(died)
        await running
    finally:
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)


@asynccontextmanager
async def restarted(harness: Harness, monkeypatch: pytest.MonkeyPatch, prepare: Any) -> AsyncIterator[None]:
    """An engine after a crash, which restores its models in the background."""
    await harness.crash()
    with monkeypatch.context() as patched:
        patched.setattr(recovery.Recovery, "run", recovery.Recovery.begin)
        await harness.start(prepare, run=in_background)
    yield


async def steps(trainer: Trainer, *seeds: int) -> list[dict[str, Any]]:
    return [await trainer.step(seed) for seed in seeds]


async def test_others_train_save_and_begin_while_a_model_is_restored(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness_in(tmp_path / "steady") as steady:
        await steady.start()
        alone = await Trainer.create(steady)
        expected = await steps(alone, 1, 2, 3), await alone.state()
    slow, other = await Trainer.create(harness), await Trainer.create(harness, tenant="other", seed=2)
    seen = await steps(slow, 1, 2)
    await other.step(1)
    slow_one = SlowRepeats(slow)
    async with restarted(harness, monkeypatch, slow_one):
        slow_one.allowed.release(3)  # some of 7
        await until(lambda: slow_one.begun == 3)
        waiting = await slow.send_step(3)
        assert (await other.step(2))["optimizer_step"] == 2
        await other.do(Kind.SAVE_WEIGHTS, path="meanwhile")
        new = await Trainer.create(harness, tenant="new", seed=3)
        assert (await new.step(1))["optimizer_step"] == 1
        assert slow_one.begun == 3
        harness.parts.activity.look()
        activity = harness.parts.activity.now
        assert activity.models[slow.model_id].waits_for == "recovery"
        assert activity.recovery is not None
        assert (activity.recovery.repeated, activity.recovery.commands) == (3 + 4, 7 + 4)
        slow_one.allowed.release(100)
        seen.append((await slow.result(waiting))["metrics"])
        assert (seen, await slow.state()) == expected
        await until(lambda: not harness.recovery._holds.models)
        harness.parts.activity.look()
        assert harness.parts.activity.now.recovery is None


async def test_a_model_with_commands_is_restored_before_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "AT_ONCE", 1)
    first, second = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for trainer in (first, second):
        await trainer.step(1)
    slow = SlowRepeats(first)
    await harness.crash()
    waiting = await second.send_step(2)
    async with restarted(harness, monkeypatch, slow):
        assert (await second.result(waiting))["metrics"]["optimizer_step"] == 2
        assert slow.begun == 0
        slow.allowed.release(100)


async def test_each_model_is_restored_once_however_often_recovery_looks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = [await Trainer.create(harness, seed=seed) for seed in (1, 2, 3)]
    for trainer in trainers:
        await trainer.step(1)
    monkeypatch.setattr(recovery, "AT_ONCE", 1)
    monkeypatch.setattr(recovery, "LOOK_S", 0.0)
    begun: list[str] = []

    def count(harness: Harness) -> None:
        load = harness.recovery.restoring._load_snapshot

        def counted(model: Any) -> None:
            begun.append(model.id)
            load(model)

        harness.recovery.restoring._load_snapshot = counted  # type: ignore[method-assign]

    async with restarted(harness, monkeypatch, count):
        assert [(await trainer.step(2))["optimizer_step"] for trainer in trainers] == [2, 2, 2]
        await until(lambda: not harness.recovery._unrestored)
    assert sorted(begun) == sorted(trainer.model_id for trainer in trainers)


async def gone(harness: Harness, trainer: Trainer, ago_s: float = LONG_AGO_S) -> None:
    """The client's last heartbeat was so long ago."""
    query = update(sessions).where(sessions.c.id == trainer.session.id)
    harness.database.write(lambda c: c.execute(query.values(heartbeat_at=sessions.c.heartbeat_at - ago_s)))


@pytest.mark.parametrize("comes_back", ["with a heartbeat", "with a command"])
async def test_a_model_whose_client_is_gone_is_restored_when_it_comes_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, comes_back: str
) -> None:
    silent, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for trainer in (silent, other):
        await trainer.step(1)
    before = await silent.state()
    await gone(harness, silent)
    monkeypatch.setattr(recovery, "LOOK_S", 0.01)
    async with restarted(harness, monkeypatch, lambda _: None):
        assert (await other.step(2))["optimizer_step"] == 2
        await until(lambda: harness.recovery._unrestored == {silent.model_id})
        assert harness.scheduler.is_busy(silent.model_id)
        if comes_back == "with a heartbeat":
            await harness.sessions.beat(silent.session)
            await until(lambda: not harness.scheduler.is_busy(silent.model_id))
            assert await silent.state() == before
        assert (await silent.step(2))["optimizer_step"] == 2


async def test_a_stop_and_a_crash_keep_a_model_whose_client_is_gone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = await Trainer.create(harness)
    await silent.step(1)
    before = await silent.state()
    await gone(harness, silent)
    for end in (harness.crash, harness.stop, harness.crash):
        async with restarted(harness, monkeypatch, lambda _: None):
            await end()
    assert not list(harness.config.snapshots_dir.glob("*/*"))
    async with restarted(harness, monkeypatch, lambda _: None):
        await harness.sessions.beat(silent.session)
        await until(lambda: not harness.scheduler.is_busy(silent.model_id))
        assert await silent.state() == before


async def test_a_model_whose_session_ended_while_the_engine_was_away_is_not_restored(harness: Harness) -> None:
    ended, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for trainer in (ended, other):
        await trainer.step(1)
    await harness.crash()
    assert await harness.sessions.end(ended.session, "finished", None, None)
    await harness.start()
    assert harness.scheduler.model_ids == {other.model_id}
    assert harness.model_row(ended.model_id).status == "closed"
    assert set(rank_of(harness.backend).adapters) == {other.model_id}


async def test_a_session_that_ends_while_its_model_is_restored_frees_the_model(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    await steps(trainer, 1, 2)
    slow = SlowRepeats(trainer)
    async with restarted(harness, monkeypatch, slow):
        slow.allowed.release(2)
        await until(lambda: slow.begun == 2)
        await harness.end(trainer.session)
        slow.allowed.release(100)
        await other.step(1)
        await until(lambda: trainer.model_id not in rank_of(harness.backend).adapters)
        await until(lambda: not harness.recovery._holds.models)
    assert harness.model_row(trainer.model_id).status == "closed"
    assert "cannot be restored" not in caplog.text
    await harness.stop()
    assert len(list(harness.config.snapshots_dir.glob("*/*"))) == 1


@pytest.mark.parametrize("interval_s", [1e-9, 1e9], ids=["snapshots", "no snapshots"])
async def test_an_engine_that_stops_while_it_repeats_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    """With snapshots after steps, the next engine repeats what comes behind the last step that was repeated."""
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        trainer, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
        await steps(trainer, 1, 2)
        await other.step(1)
        before = await trainer.state()
    async with harness_in(tmp_path / "state", snapshot_interval_s=interval_s) as harness:
        trainer, other = (Trainer(harness, t.session, t.model_id, t.seq_id) for t in (trainer, other))
        slow = SlowRepeats(trainer)
        async with restarted(harness, monkeypatch, slow):
            slow.allowed.release(5)
            await until(lambda: slow.begun == 5 and other.model_id not in harness.recovery._holds.models)
            await harness.stop()
            slow.allowed.release(100)
        assert harness.model_row(trainer.model_id).next_seq == (4 if interval_s < 1 else 0)
        assert harness.model_row(other.model_id).next_seq == 4
        await harness.start()
        assert await trainer.state() == before
        assert (await trainer.step(3))["optimizer_step"] == 3


async def test_a_suspect_runs_beside_no_command_that_is_repeated(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine died of one of them: a save, or the repetition of another model's command. The save runs between two
    commands that are repeated, and the ledger never has both."""
    saver, slow_one = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    await saver.step(1)
    await steps(slow_one, 1, 2)
    harness.kill_before_commit_of(lambda _: True)
    save = await saver.send(Kind.SAVE_WEIGHTS, path="name")
    await harness.wait_until_killed()
    slow = SlowRepeats(slow_one)
    together: list[list[str]] = []

    def watch(harness: Harness) -> None:
        slow(harness)
        write = harness._ledger._write  # type: ignore[union-attr]

        def noting() -> None:
            together.append(list(harness._ledger._running))  # type: ignore[union-attr]
            write()

        harness._ledger._write = noting  # type: ignore[union-attr, method-assign]

    async with restarted(harness, monkeypatch, watch):
        slow.allowed.release(100)
        await saver.result(save)
        await until(lambda: not harness.recovery._unrestored)
        await until(lambda: not harness.scheduler.suspect_is_due)  # its result can be read a moment before
    assert any(save in running for running in together)
    assert not [running for running in together if save in running and len(running) > 1]


async def test_a_command_that_kills_the_engine_when_repeated_in_the_background_fails_its_model_at_the_second_death(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for trainer in (poisoned, other):
        await trainer.step(1)
    before = await other.state()

    def die_of(harness: Harness) -> None:
        run = harness.backend.run

        def run_or_die(passes: Any) -> Any:
            if passes[0].model_id == poisoned.model_id:
                raise Killed
            return run(passes)

        harness.backend.run = run_or_die

    for _ in range(2):
        async with restarted(harness, monkeypatch, die_of):
            await harness.wait_until_killed()
    async with restarted(harness, monkeypatch, die_of):
        await until(lambda: harness.model_row(poisoned.model_id).status == "failed")
        await until(lambda: not harness.recovery._unrestored)
        assert await other.state() == before
        assert (await other.step(2))["optimizer_step"] == 2
