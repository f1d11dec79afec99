"""The server's own work on a database, one step at a time, for `calibrate`: the CPU time that it takes in the process
and in PostgreSQL, in groups of 1 and of MANY.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import skyrl.storage.db.sessions
from benchmarks.processes import tree_seconds
from benchmarks.simulation.services import Cost
from skyrl.base.types.requests import Kind, new_request_id
from skyrl.storage.db import commands, futures
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.notices import PostgresNotify

MANY = 64
RESULT, BODY = b"r" * 700, b"b" * 2100
"""As large as the result and the body of a sample of 64 tokens."""
SESSIONS = 20_000
Pair = tuple[Cost, Cost]
"""Of the API process and of the database."""


class DatabaseSteps:
    """One process of the server's own code on an empty database."""

    def __init__(self, database: Database, conninfo: str, postgres: int) -> None:
        self._database = database
        self._conninfo = conninfo
        self._postgres = postgres
        self._writer = GroupCommitWriter(database)

    async def spent(self, work: Callable[[], Awaitable[object]], times: int) -> tuple[float, float]:
        """CPU seconds of this process and of the database for one `work`, of `times` in turn."""
        await work()
        own, server = time.process_time(), tree_seconds(self._postgres)
        for _ in range(times):
            await work()
        return (time.process_time() - own) / times, (tree_seconds(self._postgres) - server) / times

    async def by_count(self, work: Callable[[int], Awaitable[object]], times: int) -> Pair:
        one, many = [await self.spent(lambda n=n: work(n), times) for n in (1, MANY)]
        costs: list[Cost] = []
        for few, more in zip(one, many, strict=True):
            each = max(0.0, (more - few) / (MANY - 1))
            costs.append(Cost(max(0.0, few - each), each))
        return costs[0], costs[1]

    async def commits(self) -> tuple[Pair, Pair, list[str]]:
        """Of recording and of settling; and the ids of all settled samples."""
        open_ids: list[str] = []

        async def record(count: int) -> None:
            ids = [new_request_id() for _ in range(count)]
            open_ids.extend(ids)
            await asyncio.gather(*(self._writer.execute(rows.RECORD, _row(each)) for each in ids))

        recorded = await self.by_count(record, 200)
        waiting = iter(list(open_ids))

        async def settle(count: int) -> None:
            outcome, now = Outcome(result=RESULT), time.time()
            some = [rows.settlement(next(waiting), outcome, now) for _ in range(count)]
            await asyncio.gather(*(self._writer.execute(rows.SETTLE_SAMPLE, each) for each in some))

        return recorded, await self.by_count(settle, 200), open_ids

    async def reads(self, settled: list[str]) -> tuple[Pair, Pair]:
        """Of reading ends, and of reading one result."""
        self._database.write(lambda c: c.exec_driver_sql("ANALYZE futures"))  # else PostgreSQL sorts all of them
        last = await self._database.read_async(futures.last_end)
        ends = await self._database.read_async(lambda c: futures.ends_after(c, 0.0, 100_000))
        after = {count: ends[-count - 1].ended_at + 1e-6 for count in (1, MANY)}
        assert last >= after[1]

        async def read(count: int) -> None:
            await self._database.read_async(lambda c: futures.ends_after(c, after[count], 5_000))

        async def one() -> None:
            await self._database.read_async(lambda c: rows.find(c, settled[0]))

        own, server = await self.spent(one, 300)
        return await self.by_count(read, 300), (Cost(own), Cost(server))

    async def notices(self) -> tuple[Cost, Cost, Cost]:
        """Of sending one notice; of the database for it and for each listener; and of hearing it, with its ids."""
        few, many = 1, 9
        taken = {(count, ids): await self._notices(count, ids) for count in (few, many) for ids in (2, 2 * MANY)}
        (own_1, db_1), (own_9, db_9) = taken[few, 2], taken[many, 2]
        hear = max(0.0, (own_9 - own_1) / (many - few))
        hear_each = max(0.0, (taken[many, 2 * MANY][0] - own_9) / many / (2 * MANY - 2))
        db_each = max(0.0, (db_9 - db_1) / (many - few))
        return (
            Cost(max(0.0, own_1 - hear)),
            Cost(max(0.0, db_1 - db_each), db_each),
            Cost(max(0.0, hear - 2 * hear_each), hear_each),
        )

    async def _notices(self, listeners: int, ids: int) -> tuple[float, float]:
        heard: asyncio.Queue[None] = asyncio.Queue()

        def hear(notices: list[str]) -> None:
            heard.put_nowait(None)
            asyncio.get_running_loop().create_task(_nothing(notices))

        links = [PostgresNotify(self._conninfo, f"p/{n}", hear) for n in range(listeners + 1)]
        tasks = [asyncio.create_task(link.run()) for link in links]
        await asyncio.sleep(1)
        names = [new_request_id() for _ in range(ids)]

        async def send() -> None:
            links[0].send(names)
            for _ in range(listeners):
                await heard.get()

        found = await self.spent(send, 200)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def looks(self) -> dict[str, Cost]:
        """Of a look and of a comparison, by sessions, in the process and in the database; and of a heartbeat's row."""
        sessions = Sessions(self._database, self._writer)
        own = [await sessions.create("t", [], None, "0.38.0") for _ in range(4)]
        await asyncio.gather(*(sessions.create("t", [], None, "0.38.0") for _ in range(SESSIONS)))
        await sessions.look(3600)
        mine, server = await self.spent(lambda: sessions.look(3600), 20)
        beat, _ = await self.spent(lambda: asyncio.gather(*(sessions.beat(own[0]) for _ in range(MANY))), 20)
        with patch.object(skyrl.storage.db.sessions, "COMPARE_S", 0.0):
            both, both_db = await self.spent(lambda: sessions.look(3600), 20)
        return {
            "look_api": Cost(0.0, mine / SESSIONS),
            "look_db": Cost(0.0, server / SESSIONS),
            "compare_api": Cost(0.0, max(0.0, both - mine) / SESSIONS),
            "compare_db": Cost(0.0, max(0.0, both_db - server) / SESSIONS),
            "beat": Cost(beat / MANY + 60e-6),  # the request itself: heartbeats of one process in docs/performance.md
        }

    async def first_beats(self) -> tuple[Pair, Pair]:
        """Of reading the rows of sessions that the process does not know, and of writing heartbeats."""
        made, fresh = Sessions(self._database, self._writer), Sessions(self._database, self._writer)
        known = [await made.create("t", [], None, "0.38.0") for _ in range(MANY)]

        async def find(count: int) -> None:
            for session in known[:count]:
                fresh.forget(session.id)
            await asyncio.gather(*(fresh.find(session.id, "t") for session in known[:count]))

        async def beat(count: int) -> None:
            await asyncio.gather(*(fresh.beat(session) for session in known[:count]))

        return await self.by_count(find, 200), await self.by_count(beat, 200)

    async def engine_commits(self) -> Pair:
        """Of an engine's read of the bodies of commands, and of one transaction that settles them."""
        outcome = Outcome(result=RESULT)

        async def settle(count: int) -> None:
            ids = [new_request_id() for _ in range(count)]
            self._database.read(lambda c: commands.bodies(c, ids))
            self._database.write(lambda c: rows.settle(c, [(each, outcome) for each in ids], time.time()))

        return await self.by_count(settle, 200)

    async def close(self) -> None:
        await self._writer.close()


async def _nothing(_: list[str]) -> None:
    pass


def _row(request_id: str) -> dict[str, Any]:
    session = "s" + "0" * 24
    return {
        "id": request_id,
        "kind": Kind.EXTERNAL,
        "tenant": "t",
        "session_id": session,
        "model_id": None,
        "seq_id": None,
        "sampling_session_id": f"{session}:sampler:0",
        "sample_seq_id": None,
        "digest": b"0" * 32,
        "body": BODY,
        "body_format": "json",
        "status": "pending",
        "result_format": "proto",
        "created_at": time.time(),
        "owner": "server/0",
        "not_before": None,
        "trace": None,
    }
