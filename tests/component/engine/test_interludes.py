"""Small steps between the micro-batches of a long pass, with real parts."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, harness_in

from skyrl.engine import interludes
from skyrl.storage.db.faults import DatabaseError

LONG = [120] * 4
"""Tokens of each sequence. Each is a micro-batch."""


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(interludes, "ASK_AFTER_S", 0.0)
    async with harness_in(tmp_path, backend_config={"trainer.micro_batch_tokens": 128}) as harness:
        await harness.start()
        yield harness


class Pair:
    """A tenant with a long pass, and one with small steps, whose models exist."""

    def __init__(self, long: Trainer, small: Trainer) -> None:
        self.long, self.small = long, small

    @classmethod
    async def create(cls, harness: Harness) -> Pair:
        trainers = [
            await Trainer.create(harness, tenant=name, seed=seed) for seed, name in enumerate(("long", "small"))
        ]
        for trainer in trainers:
            assert trainer.creating is not None
            await trainer.result(trainer.creating)
        return cls(*trainers)

    async def send(self, harness: Harness) -> tuple[list[str], list[str]]:
        """The small tenant's step arrives when the first micro-batch of the long pass has run. Returns the requests of
        the long and of the small tenant."""
        rank, began, arrived = harness.backend.group.rank, threading.Event(), threading.Event()
        between = rank.between

        def after_first() -> None:
            began.set()
            assert arrived.wait(60)
            between()

        rank.between = after_first
        long = [await self.long.forward_backward(1, None, *LONG), await self.long.optim_step()]
        await harness.threads.on_files(lambda: began.wait(60))
        small = [await self.small.forward_backward(2, None, 9), await self.small.optim_step()]
        await harness.queued(3)
        arrived.set()
        return long, small


async def test_a_small_step_runs_within_a_long_pass_and_changes_no_bit_of_either(harness: Harness) -> None:
    alone = await Pair.create(harness)
    for trainer, lengths, seed in ((alone.long, LONG, 1), (alone.small, [9], 2)):
        await trainer.forward_backward(seed, None, *lengths)
        await trainer.result(await trainer.optim_step())
    ended: list[str] = []
    settle = harness.parts.settlement.settle

    def settled(outcomes: list, *rest: Any, **options: Any) -> None:
        ended.extend(request_id for request_id, _ in outcomes)
        settle(outcomes, *rest, **options)

    harness.parts.settlement.settle = settled  # type: ignore[method-assign,assignment]
    pair = await Pair.create(harness)
    ended.clear()
    long, small = await pair.send(harness)
    await pair.long.result(long[-1])
    assert ended == [*small, *long]
    assert [await each.state() for each in (pair.long, pair.small)] == [
        await each.state() for each in (alone.long, alone.small)
    ]


async def test_a_pass_is_put_off_for_so_long_only(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interludes, "MOST_S", 1e-9)
    ended: list[str] = []
    settle = harness.parts.settlement.settle

    def settled(outcomes: Any, *rest: Any, **options: Any) -> None:
        ended.extend(request_id for request_id, _ in outcomes)
        settle(outcomes, *rest, **options)

    harness.parts.settlement.settle = settled  # type: ignore[method-assign,assignment]
    pair = await Pair.create(harness)
    ended.clear()
    long, small = await pair.send(harness)
    await pair.long.result(long[-1])
    await pair.small.result(small[-1])
    assert ended.index(long[0]) < ended.index(small[0])


async def test_an_engine_that_dies_within_an_interrupted_pass_changes_no_bit(harness: Harness) -> None:
    alone = await Pair.create(harness)
    for trainer, lengths, seed in ((alone.long, LONG, 1), (alone.small, [9], 2)):
        await trainer.forward_backward(seed, None, *lengths)
        await trainer.result(await trainer.optim_step())
    pair = await Pair.create(harness)
    dying: list[str] = []
    harness.kill_before_commit_of(lambda request_id: request_id in dying)
    harness.parts.scheduler.hold(pair.small.model_id)
    sending = await pair.send(harness)
    long, small = sending
    dying.append(small[-1])
    harness.parts.scheduler.release(pair.small.model_id)
    harness.engine.ring()
    await harness.wait_until_killed()
    await harness.start()
    await pair.long.result(long[-1])
    await pair.small.result(small[-1])
    assert [await each.state() for each in (pair.long, pair.small)] == [
        await each.state() for each in (alone.long, alone.small)
    ]


async def test_a_database_that_fails_a_small_step_ends_the_engine_and_not_the_long_pass(harness: Harness) -> None:
    pair = await Pair.create(harness)
    settle = harness.parts.settlement.settle

    def fails(outcomes: list, *rest: Any, **options: Any) -> None:
        if any(request_id.startswith(pair.small.session.id) or request_id in small for request_id, _ in outcomes):
            raise DatabaseError("the disk is full")
        settle(outcomes, *rest, **options)

    small: list[str] = []
    record = pair.small.forward_backward

    async def noted(*arguments: object) -> str:
        small.append(request_id := await record(*arguments))  # type: ignore[arg-type]
        return request_id

    pair.small.forward_backward = noted  # type: ignore[method-assign]
    harness.parts.settlement.settle = fails  # type: ignore[method-assign,assignment]
    long, sent = await pair.send(harness)
    await harness.wait_until_killed(DatabaseError)
    assert (await pair.long.outcome(long[0])).error is None
    await harness.start()
    for trainer, request_id in ((pair.long, long[-1]), (pair.small, sent[-1])):
        await trainer.result(request_id)
