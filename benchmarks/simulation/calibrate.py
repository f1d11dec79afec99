"""Measures the CPU time of each step on the real parts: `python -m benchmarks.simulation.calibrate`.

The database's steps run alone, in groups of 1 and of MANY. The event loop's steps are what is left of the CPU per
sample of one server with one API process. All figures are CPU seconds. On a busy machine they are larger, because
others use its caches: `calibration_s` says how fast the machine was.
Writes `benchmarks/results/cluster-services.json`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import asdict, fields
from typing import Any
from unittest.mock import patch

import uvloop

import skyrl.storage.db.sessions
from benchmarks.calibration import calibrate
from benchmarks.machine import facts
from benchmarks.processes import tree_seconds
from benchmarks.simulation.real import cluster, postgres_pid
from benchmarks.simulation.services import FILE, Cost, Services
from skyrl.base.types.ids import new_request_id
from skyrl.base.types.kinds import Kind
from skyrl.storage.db import futures as rows
from skyrl.storage.db import sampled
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.migrate import migrate
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.notify.postgres import PostgresNotify
from tests.postgres_server import PostgresServer

MANY = 64
RESULT, BODY = b"r" * 700, b"b" * 2100
"""As large as the result and the body of a sample of 64 tokens."""
SESSIONS = 20_000
Pair = tuple[Cost, Cost]
"""Of the API process and of the database."""


class Bench:
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
        last = await self._database.read_async(sampled.last_end)
        ends = await self._database.read_async(lambda c: sampled.ends_after(c, 0.0, 100_000))
        after = {count: ends[-count - 1].ended_at + 1e-6 for count in (1, MANY)}
        assert last >= after[1]

        async def read(count: int) -> None:
            await self._database.read_async(lambda c: sampled.ends_after(c, after[count], 5_000))

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


async def _database_steps(bench: Bench) -> dict[str, Cost]:
    recorded, settled, ids = await bench.commits()
    ends, one = await bench.reads(ids)
    sent, carried, heard = await bench.notices()
    looks = await bench.looks()
    await bench.close()
    return {
        "record_api": recorded[0],
        "record_db": recorded[1],
        "settle_api": settled[0],
        "settle_db": settled[1],
        "read_ends_api": ends[0],
        "read_ends_db": ends[1],
        "read_one_api": one[0],
        "read_one_db": one[1],
        "notify_api": sent,
        "notify_db": carried,
        "hear_api": heard,
    } | looks


def database_steps() -> dict[str, Cost]:
    server = PostgresServer()
    try:
        server.start()
        name = server.new_database()
        url = server.url(name)
        with closing(Database(url)) as database:
            migrate(database)
            bench = Bench(database, url.replace("+psycopg", ""), postgres_pid())
            return uvloop.run(_database_steps(bench))
    finally:
        server.remove()


SHARES = {"submit": 0.30, "forward": 0.15, "complete": 0.25, "retrieve": 0.20, "poll": 0.10}
"""How the event loop's work for a sample is dealt among its steps. The sum alone decides how many samples a process
can do; the shares only decide when in a sample's life it works."""


def whole_samples(found: dict[str, Cost]) -> dict[str, Cost]:
    """The event loop's steps: one server under load, less the database's steps and the idle work."""
    with cluster(1, 2, delay_ms=200) as real:
        groups = real.groups()
        before = tree_seconds(groups["api"][0])
        time.sleep(5)
        idle = (tree_seconds(groups["api"][0]) - before) / 5
        measured = real.load(64, 4, 10, tenants=8).result()
        commits = real.commits()
    cpu, rate, polls = measured["cpu_ms"], measured["samples_per_s"], measured["polls_per_sample"]
    groups_per_sample = commits["groups"] / commits["rows"] * 2
    database = found["record_api"].each + found["settle_api"].each + found["record_api"].base * groups_per_sample
    database += min(polls, 50 / rate) * found["read_ends_api"].base + found["read_ends_api"].each
    loop = max(0.0, cpu["api"] / 1e3 - idle / rate - database)
    steps = {name: Cost(share * loop) for name, share in SHARES.items()}
    steps["poll"] = Cost(steps["poll"].base / polls)
    return steps | {
        "idle": Cost(idle),
        "router": Cost(cpu["router"] / 1e3),
        "replica": Cost(cpu["replicas"] / 1e3),
        "client": Cost(cpu["clients"] / 1e3),
    }


def main() -> None:
    before = calibrate()
    found = database_steps()
    found |= whole_samples(found)
    machine = (before + calibrate()) / 2
    services = Services(**{field.name: found[field.name] for field in fields(Services)})
    command = "python -m benchmarks.simulation.calibrate"
    result = {"command": command, "facts": facts(), "calibration_s": machine, "services": asdict(services)}
    FILE.write_text(json.dumps(result, indent=1) + "\n")
    for name, cost in found.items():
        print(f"{name:14} {cost.base * 1e6:9.1f} µs  + {cost.each * 1e6:7.2f} µs each")


if __name__ == "__main__":
    main()
