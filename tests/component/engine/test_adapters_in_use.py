"""Which adapters a replica loads before it is used: the recently sampled ones. Runs on both databases."""

from __future__ import annotations

import time

from sqlalchemy import update

from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights
from skyrl.storage.db import adapter_versions
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.database import Database
from skyrl.storage.db.samplers import Sampler, add_sampler
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH

NOW = time.time()


def add(
    database: Database, session: str, number: int, adapter: str | None, used_s_ago: float, status: str = "active"
) -> None:
    weights = BaseWeights() if adapter is None else AdapterVersion(adapter)
    sampler = Sampler(f"{session}:sample:{number}", session, "tenant", "tiny", None, weights)
    database.write(lambda c: add_sampler(c, sampler, number))
    at = None if adapter is None else NOW - used_s_ago
    statement = update(samplers).where(samplers.c.id == sampler.id)
    database.write(lambda c: c.execute(statement.values(last_used_at=at, status=status)))


@ON_BOTH
async def test_the_adapters_in_use_are_the_most_recently_sampled_ones(database: Database) -> None:
    writer = GroupCommitWriter(database)
    session = (await Sessions(database, writer).create("tenant", [], None, "")).id
    await writer.close()
    add(database, session, 0, "m@1", 500)
    add(database, session, 1, "m@2", 30)
    add(database, session, 2, "m@1", 10)
    add(database, session, 3, "m@3", 601)
    add(database, session, 4, "m@4", 1, "closed")
    add(database, session, 5, "m@5", 1, "dropped")
    add(database, session, 6, None, 1)
    add(database, session, 7, "n@1", 40)

    def in_use(limit: int) -> list[str]:
        return [adapter.name for adapter in database.read(lambda c: adapter_versions.in_use(c, NOW - 600, limit))]

    assert in_use(8) == ["m@1", "m@2", "n@1"], "each adapter once, ordered by its latest sample"
    assert in_use(2) == ["m@1", "m@2"]
    assert in_use(0) == []
    full = update(samplers).where(samplers.c.id == f"{session}:sample:2").values(weights=FullWeights("step-7"))
    database.write(lambda c: c.execute(full))
    assert in_use(2) == ["m@2", "n@1"], "full weights are not an adapter"
