"""How a client hears which of its samples have ended: what each way costs, with the same samples on the same database.

`each`: one long poll for each sample (`retrieve_future`). `memory`: one long poll for all samples of a client, answered
from a list in memory, which a restart would lose: the least that such a poll can cost. `stored`: one long poll for all
samples of a client, answered from the database, which is what the server does (`skyrl/futures/stored_ends.py`).

In this process, on a new SQLite file, without HTTP and without an inference server: a sample is recorded, ends after
UPSTREAM_S, is settled, told and read, and the client sends the next. The ways take turns for ROUNDS rounds. With
`--server` the load generator of `make bench` asks a whole server, one poll for each sample and one for all in turn.

Usage: python -m benchmarks.ends [--server] [--rounds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import uvloop
from sqlalchemy import insert

from benchmarks.processes import parts_of
from benchmarks.samples import LoadSpec
from benchmarks.series import quantile
from benchmarks.stage import NullUpstream, Stage, gateway
from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.db.futures import Outcome
from skyrl.db.migrate import migrate
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.completions import Completion, Target
from skyrl.futures.store import FutureStore
from skyrl.types.ids import new_request_id
from skyrl.types.kinds import Kind
from skyrl.types.requests import NewRequest

SETTINGS = ((1, 64, 0), (64, 8, 0), (1, 64, 50_000))
"""Clients, samples that each has in flight, and samples that each has had before."""
SAMPLES = 6_000
ROUNDS = 5
UPSTREAM_S = 0.02
BODY, RESULT = bytes(2_000), Outcome(bytes(1_000), "proto:sample")
HOLD_S = 30.0


class Ends(Protocol):
    """Tells which samples of a client have ended, after a cursor."""

    async def poll(self, target: Target, cursor: int, timeout_s: float) -> tuple[int, list[Completion]]: ...


class MemoryEnds:
    """A list for each client in the order in which its samples ended here; a cursor is a place in that list."""

    def __init__(self) -> None:
        self._ends: dict[Target, list[Completion]] = {}
        self._changed: dict[Target, asyncio.Event] = {}

    def note(self, target: Target, end: Completion) -> None:
        self._ends.setdefault(target, []).append(end)
        if (changed := self._changed.pop(target, None)) is not None:
            changed.set()

    async def poll(self, target: Target, cursor: int, timeout_s: float) -> tuple[int, list[Completion]]:
        if len(self._ends.get(target, ())) == cursor:
            changed = self._changed.setdefault(target, asyncio.Event())
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        ends = self._ends[target]
        return len(ends), ends[cursor:]


@dataclass
class Client:
    target: Target
    cursor: int = 0
    sent: int = 0
    ended_at: dict[str, float] = field(default_factory=dict)


class Run:
    """Samples of several clients, until `samples` of them were told."""

    def __init__(self, store: FutureStore, way: str, memory: MemoryEnds, samples: int) -> None:
        self._store = store
        self._way = way
        self._memory = memory
        self._ends: Ends = memory if way == "memory" else store.ends
        self._left = samples
        self._tasks: set[asyncio.Task[None]] = set()
        self.polls = 0
        self.waits: list[float] = []
        """Seconds from the end of each sample at the inference server until its client was told."""

    async def of(self, client: Client, in_flight: int) -> None:
        if self._way == "each":
            await asyncio.gather(*(self._one_by_one(client) for _ in range(in_flight)))
            return
        pending = 0
        while True:
            wanted = min(in_flight - pending, self._left)
            self._left -= wanted
            pending += wanted
            await asyncio.gather(*(self._send(client) for _ in range(wanted)))
            if not pending:
                return
            client.cursor, told = await self._ends.poll(client.target, client.cursor, HOLD_S)
            self.polls += 1
            for end in told:
                if (ended_at := client.ended_at.pop(end.request_id, None)) is not None:
                    pending -= 1
                    self.waits.append(time.perf_counter() - ended_at)
                    assert await self._store.wait(end.request_id, "tenant", HOLD_S) is not None

    async def _one_by_one(self, client: Client) -> None:
        while self._left:
            self._left -= 1
            request_id = await self._send(client)
            assert await self._store.wait(request_id, "tenant", HOLD_S) is not None
            self.polls += 1
            self.waits.append(time.perf_counter() - client.ended_at.pop(request_id))

    async def _send(self, client: Client) -> str:
        client.sent += 1
        session, sampler = client.target.session_id, client.target.sampling_session_id
        request = NewRequest(
            Kind.EXTERNAL, "tenant", session, BODY, sampling_session_id=sampler, sample_seq_id=client.sent
        )
        request_id, _ = await self._store.record(request)
        task = asyncio.create_task(self._end(client, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return request_id

    async def _end(self, client: Client, request_id: str) -> None:
        await asyncio.sleep(UPSTREAM_S * random.uniform(0.5, 1.5))
        client.ended_at[request_id] = time.perf_counter()
        await self._store.settle(request_id, RESULT)
        if self._way == "memory":
            self._memory.note(client.target, Completion(request_id, len(RESULT.result), time.time()))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _remember(database: Database, target: Target, count: int) -> int:
    """Samples that the client has had and was told of; returns its cursor."""
    began = time.time() - 60
    for start in range(0, count, 1_000):
        database.write(
            lambda c, start=start: c.execute(
                insert(rows.futures),
                [
                    {
                        "id": new_request_id(),
                        "kind": Kind.EXTERNAL,
                        "tenant": "tenant",
                        "session_id": target.session_id,
                        "sampling_session_id": target.sampling_session_id,
                        "sample_seq_id": 10_000_000 + number,
                        "digest": b"",
                        "body_format": "json",
                        "status": "done",
                        "result": RESULT.result,
                        "result_format": "proto:sample",
                        "created_at": began,
                        "completed_at": began + number * 1e-4,
                    }
                    for number in range(start, min(count, start + 1_000))
                ],
            )
        )
    return int((began + count * 1e-4) * 1e6)


async def measure(way: str, clients: int, in_flight: int, before: int, samples: int) -> dict[str, float]:
    """CPU seconds of this process per 1,000 samples, and how long their clients waited to be told, in ms."""
    with tempfile.TemporaryDirectory(prefix="skyrl-ends-") as directory:
        database = Database(f"sqlite:///{Path(directory) / 'skyrl.db'}")
        migrate(database)
        writer = GroupCommitWriter(database)
        store = FutureStore(database, writer, "here")
        memory = MemoryEnds()
        everybody = [Client(Target("s1", f"s1:sample:{number}", 0)) for number in range(clients)]
        for client in everybody:
            newest = _remember(database, client.target, before)
            client.cursor = newest if way == "stored" else 0
        try:
            warm_up = Run(store, way, memory, samples // 5)
            await asyncio.gather(*(warm_up.of(client, in_flight) for client in everybody))
            run = Run(store, way, memory, samples)
            used, began = _cpu_s(), time.perf_counter()
            await asyncio.gather(*(run.of(client, in_flight) for client in everybody))
            spent_s, wall_s = _cpu_s() - used, time.perf_counter() - began
        finally:
            await writer.close()
            database.close()
    return {
        "cpu_s_per_1000": spent_s / samples * 1e3,
        "told_p50_ms": quantile(run.waits, 0.5) * 1e3,
        "told_p99_ms": quantile(run.waits, 0.99) * 1e3,
        "polls_per_1000": run.polls / samples * 1e3,
        "samples_per_s": samples / wall_s,
    }


WAYS = ("each", "memory", "stored")


def compare(rounds: int, samples: int) -> list[dict[str, Any]]:
    found = []
    for clients, in_flight, before in SETTINGS:
        results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                results[way].append(uvloop.run(measure(way, clients, in_flight, before, samples)))
        for way in WAYS:
            row: dict[str, Any] = {"way": way, "clients": clients, "in_flight": in_flight, "before": before}
            row |= {name: round(_median(r[name] for r in results[way]), 3) for name in results[way][0]}
            costs = [r["cpu_s_per_1000"] for r in results[way]]
            row["cpu_range"] = [round(min(costs), 3), round(max(costs), 3)]
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def through_server(rounds: int) -> list[dict[str, Any]]:
    """The same comparison at a whole server in front of the null upstream: one client, and 64 with 8 in flight each."""
    with NullUpstream() as upstream, gateway(upstream) as server:
        stage = Stage(upstream, quick=False, calibration_s=1.0)
        api = parts_of(server.pid)["api"]
        for _ in range(rounds):
            for clients, in_flight in ((1, 64), (64, 512)):
                for path in ("tinker", "one-poll"):
                    spec = LoadSpec(
                        server.url, path, in_flight, 4.0, clients=clients, pid=api, upstream_pid=upstream.pid
                    )
                    row = stage.load("ends", path, spec)
                    shown = ("server_cpu_s_per_1000", "samples_per_s", "p50_ms", "p99_ms", "foreign_cores", "errors")
                    print(path, clients, in_flight, {name: row[name] for name in shown}, flush=True)
    return stage.raw


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--server", action="store_true")
    asked = parser.parse_args()
    found = through_server(asked.rounds) if asked.server else compare(asked.rounds, asked.samples)
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
