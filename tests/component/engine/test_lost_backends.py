"""A rank of the backend dies during a command: the engine ends, and the next engine goes on with all models.

The backend decides which rank has died, and raises RankDied. `test_device_faults` tests a device that breaks.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, data, harness_in

from skyrl.base.types.requests import Kind
from skyrl.engine import main
from skyrl.storage.checkpoint_store.base import StoreError
from skyrl.trainer.protocol import RankDied

PASS = {"forward_backward_input": {"data": data(7), "loss_fn": "cross_entropy"}}
STEP = {"adam_params": {"learning_rate": 0.01, "grad_clip_norm": 1.0}}


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        yield harness


def lose_a_rank(harness: Harness, method: str, *, half_done: bool = False) -> list[str]:
    """From now on every call of this method of the backend raises. Returns a list of the threads that called the
    method."""
    act: Callable[..., Any] = getattr(harness.backend, method)
    threads: list[str] = []

    def die(*arguments: Any, **options: Any) -> None:
        threads.append(threading.current_thread().name)
        if half_done:
            act(*arguments, **options)
        raise RankDied("rank 1 has ended with exit code -9")

    setattr(harness.backend, method, die)
    return threads


def running_at_death(harness: Harness) -> list[str]:
    return json.loads(harness.config.running_file.read_text().partition("\n")[0])["running"]


@pytest.mark.parametrize("half_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kind", "method", "thread", "body"),
    [
        (Kind.FORWARD_BACKWARD, "run", "backend", PASS),
        (Kind.OPTIM_STEP, "optim_step", "backend", STEP),
        (Kind.SAVE_WEIGHTS, "save_state", "files", {"path": "name"}),
        (Kind.SAVE_WEIGHTS_FOR_SAMPLER, "save_adapter", "files", {"path": "name"}),
    ],
    ids=["pass", "step", "save", "save-for-sampler"],
)
async def test_a_rank_that_dies_during_a_command_ends_the_engine_and_loses_nothing(
    harness: Harness, tmp_path: Path, kind: Kind, method: str, thread: str, body: dict[str, Any], half_done: bool
) -> None:
    other, trainer = await Trainer.create(harness, seed=2), await Trainer.create(harness)
    for each in (other, trainer):
        await each.step(1)
        await each.result(await each.forward_backward(2))
    threads = lose_a_rank(harness, method, half_done=half_done)
    request_id = await trainer.send(kind, **body)
    await harness.wait_until_killed(RankDied)
    assert [name.rpartition("_")[0] for name in threads] == [thread]
    assert running_at_death(harness) == [request_id]
    assert await harness.store.wait(request_id, "tenant", 0.0) is None, "the command is still pending"
    unharmed = await other.optim_step()
    await harness.start()
    await trainer.result(request_id)
    assert (await other.result(unharmed))["metrics"]["optimizer_step"] == 2
    states = [await each.state() for each in (other, trainer)]
    async with harness_in(tmp_path / "steady") as steady:
        await steady.start()
        for seed, state in ((2, states[0]), (1, states[1])):
            each = await Trainer.create(steady, seed=seed)
            await each.step(1)
            await each.result(await each.forward_backward(2))
            await (each.do(Kind.OPTIM_STEP, **STEP) if seed == 2 else each.do(kind, **body))
            assert await each.state() == state


async def test_a_rank_that_dies_during_a_load_ends_the_engine(harness: Harness) -> None:
    """A load runs on a file thread, which waits for the backend's thread."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="name"))["path"]
    before = await trainer.state()
    threads = lose_a_rank(harness, "load_state")
    await trainer.step(2)
    request_id = await trainer.send(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    await harness.wait_until_killed(RankDied)
    assert [name.rpartition("_")[0] for name in threads] == ["backend"]
    await harness.start()
    await trainer.result(request_id)
    assert await trainer.state() == before


async def test_a_rank_that_dies_during_a_snapshot_ends_the_engine_and_the_earlier_snapshot_stays(
    tmp_path: Path,
) -> None:
    async with harness_in(tmp_path / "state", snapshot_interval_s=1e-9) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        await trainer.step(2)
        before = await trainer.state()
        (snapshot,) = harness.config.snapshots_dir.glob("*/*")
        lose_a_rank(harness, "save_snapshot", half_done=True)
        request_id = await trainer.send_step(3)
        await harness.wait_until_killed(RankDied)
        assert (await trainer.result(request_id))["metrics"]["optimizer_step"] == 3, (
            "the step was settled before the snapshot"
        )
        assert list(harness.config.snapshots_dir.glob("*/*")) == [snapshot]
        await harness.start()
        assert await trainer.state() != before
        assert (await trainer.step(4))["optimizer_step"] == 4


@pytest.mark.parametrize("method", ["restore_model", "run"], ids=["from its snapshot", "from its commands"])
async def test_a_rank_that_dies_during_restoration_ends_the_engine(harness: Harness, method: str) -> None:
    """While a rank dies at each start, the engine dies too. Two deaths with one model fail that model, so engines can
    start again."""
    trainer, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    await trainer.step(1)
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
    await trainer.step(2)
    before = await other.state()
    await harness.crash()
    for _ in range(2):
        with pytest.raises(RankDied):
            await harness.start(lambda harness: lose_a_rank(harness, method))
        harness.close_after_failed_start()
        assert harness.model_row(trainer.model_id).status == "ready"
        (key,) = running_at_death(harness)
        assert key.startswith("snapshot " if method == "restore_model" else "again ")
    await harness.start()
    assert harness.model_row(trainer.model_id).status == "failed"
    assert await other.state() == before


async def test_a_rank_that_dies_while_retrying_a_waiting_model_ends_the_engine(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
    before = await trainer.state()
    await harness.crash()
    monkeypatch.setattr(main, "RETRY_S", 0.01)

    def fail_once_then_lose_a_rank(harness: Harness) -> None:
        def away(*_: Any) -> None:
            lose_a_rank(harness, "restore_model")
            raise StoreError("the store is away")

        harness.backend.restore_model = away  # type: ignore[method-assign]

    await harness.start(fail_once_then_lose_a_rank, run=lambda parts: main.run_until_stopped(parts, []))
    await harness.wait_until_killed(RankDied)
    assert harness.model_row(trainer.model_id).status == "ready"
    await harness.start()
    assert await trainer.state() == before


async def test_commands_that_wait_at_the_loss_of_the_backend_run_in_the_next_engine(harness: Harness) -> None:
    """Nothing that was queued behind the lost command is settled by the engine that ends."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    lose_a_rank(harness, "run")
    sent = [
        await trainer.forward_backward(2),
        await trainer.optim_step(),
        await trainer.send(Kind.SAVE_WEIGHTS, path="x"),
    ]
    await harness.wait_until_killed(RankDied)
    assert [await harness.store.wait(each, "tenant", 0.0) for each in sent] == [None] * 3
    await harness.start()
    results = await asyncio.gather(*(trainer.result(each) for each in sent))
    assert results[1]["metrics"]["optimizer_step"] == 2
