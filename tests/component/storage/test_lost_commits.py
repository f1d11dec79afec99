"""The engine's connection breaks while PostgreSQL commits. The engine cannot know whether the commit succeeded, so it
repeats the write. Here every commit had succeeded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, harness_in, until
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from skyrl.storage.db.database import Database, RetryingDatabase
from skyrl.storage.db.futures import futures
from skyrl.storage.db.usage import usage
from tests.local_ranks import rank_of
from tests.postgres_server import ON_BOTH

LOST = OperationalError("COMMIT", None, Exception("server closed the connection unexpectedly"))


@pytest.fixture
async def harness(tmp_path: Path, migrated_url: str) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state", database_url=migrated_url) as running:
        await running.start()
        yield running


@pytest.fixture
def writes(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Every write of the engine commits and then fails, so the engine repeats it. Counts the writes."""
    retrying_database, original_write, writes_so_far = (
        RetryingDatabase(harness.config.database),
        Database.write,
        Counter[str](),
    )

    def write_and_lose_the_answer(database: Database, *arguments: Any, **options: Any) -> Any:
        result = original_write(database, *arguments, **options)
        if database is retrying_database:
            writes_so_far["writes"] += 1
            if writes_so_far["writes"] % 2:
                raise LOST
        return result

    monkeypatch.setattr(Database, "write", write_and_lose_the_answer)
    monkeypatch.setattr(harness.parts.settlement, "_database", retrying_database)
    monkeypatch.setattr(harness.parts.model_ends, "_database", retrying_database)
    yield writes_so_far
    retrying_database.close()


async def test_usage_of_training_is_counted_once_though_its_write_is_repeated(
    harness: Harness, writes: Counter[str]
) -> None:
    trainer = await Trainer.create(harness)
    for seed, length in ((1, 9), (2, 14)):
        await trainer.result(await trainer.forward_backward(seed, None, length))
    assert (await trainer.result(await trainer.optim_step()))["metrics"]["optimizer_step"] == 1
    assert writes["writes"] == 2 * 4
    query = select(usage.c.amount).where(usage.c.session_id == trainer.session.id, usage.c.kind == "training")
    assert harness.database.read(lambda c: c.execute(query).scalars().all()) == [9 + 14]


@ON_BOTH
async def test_training_is_counted_once_beside_a_clock_that_is_ahead(harness: Harness, writes: Counter[str]) -> None:
    """Another process, whose clock is an hour ahead, has ended a request: each later end gets a later time than that,
    and so another time than the engine's clock says."""
    trainer = await Trainer.create(harness)
    await trainer.state()
    ahead = time.time() + 3600
    harness.database.write(lambda c: c.execute(update(futures).values(completed_at=ahead)))
    request_ids = [await trainer.forward_backward(seed, None, length) for seed, length in ((1, 9), (2, 14))]
    for request_id in request_ids:
        await trainer.result(request_id)
    times = select(futures.c.completed_at).where(futures.c.id.in_(request_ids))
    assert all(when > ahead for when in harness.database.read(lambda c: c.execute(times).scalars().all()))
    query = select(usage.c.amount).where(usage.c.session_id == trainer.session.id, usage.c.kind == "training")
    assert harness.database.read(lambda c: c.execute(query).scalars().all()) == [9 + 14]


async def test_an_ended_session_closes_its_models_though_the_writes_are_repeated(
    harness: Harness, writes: Counter[str]
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    waiting = await trainer.forward_backward(1, trainer.seq_id + 2)  # a number before this command is missing
    await harness.queued(1)
    await harness.end(trainer.session)
    assert (await trainer.outcome(waiting)).error == "the session has ended"
    await until(lambda: not rank_of(harness.backend).adapters and not harness.scheduler.waiting)
    assert not writes["writes"] % 2
