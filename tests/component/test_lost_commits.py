"""The engine's connection breaks while PostgreSQL commits: nobody can say whether it did, so the write is repeated. It
had been done."""

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

from skyrl.db.database import Database
from skyrl.db.futures import futures
from skyrl.db.retrying_database import RetryingDatabase
from skyrl.db.usage import usage
from tests.postgres_server import ON_BOTH

LOST = OperationalError("COMMIT", None, Exception("server closed the connection unexpectedly"))


@pytest.fixture
async def harness(tmp_path: Path, migrated_url: str) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state", database_url=migrated_url) as running:
        await running.start()
        yield running


@pytest.fixture
def lost(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Each write of the engine is done, and must be repeated. Counts them."""
    patient, really, counted = RetryingDatabase(harness.config.database), Database.write, Counter[str]()

    def unheard(database: Database, *given: Any, **options: Any) -> Any:
        said = really(database, *given, **options)
        if database is patient:
            counted["writes"] += 1
            if counted["writes"] % 2:
                raise LOST
        return said

    monkeypatch.setattr(Database, "write", unheard)
    monkeypatch.setattr(harness.parts.settlement, "_database", patient)
    monkeypatch.setattr(harness.parts.model_ends, "_database", patient)
    yield counted
    patient.close()


async def test_training_is_counted_once(harness: Harness, lost: Counter[str]) -> None:
    trainer = await Trainer.create(harness)
    for seed, length in ((1, 9), (2, 14)):
        await trainer.result(await trainer.forward_backward(seed, None, length))
    assert (await trainer.result(await trainer.optim_step()))["metrics"]["optimizer_step"] == 1
    assert lost["writes"] == 2 * 4
    query = select(usage.c.amount).where(usage.c.session_id == trainer.session.id, usage.c.kind == "training")
    assert harness.database.read(lambda c: c.execute(query).scalars().all()) == [9 + 14]


@ON_BOTH
async def test_training_is_counted_once_beside_a_clock_that_is_ahead(harness: Harness, lost: Counter[str]) -> None:
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


async def test_a_session_that_ends_gives_its_models_back(harness: Harness, lost: Counter[str]) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    waiting = await trainer.forward_backward(1, trainer.seq_id + 2)  # there is a gap before it
    await harness.queued(1)
    await harness.end(trainer.session)
    assert (await trainer.outcome(waiting)).error == "the session has ended"
    await until(lambda: not harness.backend._adapters and not harness.scheduler.waiting)
    assert not lost["writes"] % 2
