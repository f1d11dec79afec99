"""The engine's connection breaks while PostgreSQL commits: nobody can say whether it did, so the write is repeated. It
had been done."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, harness_in, until
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from skyrl.db.database import Database
from skyrl.db.retrying_database import RetryingDatabase
from skyrl.db.usage import usage

LOST = OperationalError("COMMIT", None, Exception("server closed the connection unexpectedly"))


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state") as running:
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


async def test_a_session_that_ends_gives_its_models_back(harness: Harness, lost: Counter[str]) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    waiting = await trainer.forward_backward(1, trainer.seq_id + 2)  # there is a gap before it
    await harness.queued(1)
    await harness.end(trainer.session)
    assert (await trainer.outcome(waiting)).error == "the session has ended"
    await until(lambda: not harness.backend._adapters and not harness.scheduler.waiting)
    assert not lost["writes"] % 2
