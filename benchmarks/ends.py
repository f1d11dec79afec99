"""Compares the costs of three ways in which a client learns which of its samples have ended.

`each`: one long poll for each sample (`retrieve_future`). `memory`: one long poll for all samples of a client, answered
from a list in memory. A restart would lose the list, so this way only shows the lowest possible cost. `stored`: one
long poll for all samples of a client, answered from the database. The server does this
(`skyrl/server/futures/stored_ends.py`).

Everything runs in this process, on a new SQLite file, without HTTP and without an inference server. A sample is
recorded, ends after about UPSTREAM_S, and is settled; then the client learns of it, reads the result and sends the next
sample. The ways take turns for ROUNDS rounds. With `--server` the load generator of `make bench` asks a real server,
alternating between one poll for each sample and one poll for all.

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
from skyrl.base.types.ids import new_request_id
from skyrl.base.types.kinds import Kind
from skyrl.base.types.requests import NewRequest
from skyrl.server.futures.completions import Completion, Target
from skyrl.server.futures.store import FutureStore
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.migrate import migrate
from skyrl.storage.db.writer import GroupCommitWriter

SETTINGS = ((1, 64, 0), (64, 8, 0), (1, 64, 50_000))
"""Number of clients, samples in flight of each, and earlier samples of each."""
SAMPLES = 6_000
ROUNDS = 5
UPSTREAM_S = 0.02
BODY, RESULT = bytes(2_000), Outcome(bytes(1_000), "proto:sample")
HOLD_S = 30.0


class Ends(Protocol):
    """Answers a poll with the samples of a client that have ended after a cursor, and the next cursor."""

    async def poll(self, target: Target, cursor: int, timeout_s: float) -> tuple[int, list[Completion]]: ...


class MemoryEnds:
    """A list of ended samples for each client. A cursor is a place in that list."""

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
    """A run of `samples` samples, shared by several clients."""

    def __init__(self, store: FutureStore, way: str, memory: MemoryEnds, samples: int) -> None:
        self._store = store
        self._way = way
        self._memory = memory
        self._ends: Ends = memory if way == "memory" else store.ends
        self._remaining = samples
        self._tasks: set[asyncio.Task[None]] = set()
        self.polls = 0
        self.waits: list[float] = []
        """Seconds from the end of each sample at the inference server until its client knows."""

    async def serve(self, client: Client, in_flight: int) -> None:
        if self._way == "each":
            await asyncio.gather(*(self._one_by_one(client) for _ in range(in_flight)))
            return
        pending = 0
        while True:
            new = min(in_flight - pending, self._remaining)
            self._remaining -= new
            pending += new
            await asyncio.gather(*(self._send(client) for _ in range(new)))
            if not pending:
                return
            client.cursor, completions = await self._ends.poll(client.target, client.cursor, HOLD_S)
            self.polls += 1
            for end in completions:
                if (ended_at := client.ended_at.pop(end.request_id, None)) is not None:
                    pending -= 1
                    self.waits.append(time.perf_counter() - ended_at)
                    assert await self._store.wait(end.request_id, "tenant", HOLD_S) is not None

    async def _one_by_one(self, client: Client) -> None:
        while self._remaining:
            self._remaining -= 1
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
    """Insert `count` earlier samples whose ends the client knows; returns the client's cursor."""
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
    """CPU seconds of this process per 1,000 samples, and the milliseconds until clients knew of the ends."""
    with tempfile.TemporaryDirectory(prefix="skyrl-ends-") as directory:
        database = Database(f"sqlite:///{Path(directory) / 'skyrl.db'}")
        migrate(database)
        writer = GroupCommitWriter(database)
        store = FutureStore(database, writer, "here")
        memory = MemoryEnds()
        all_clients = [Client(Target("s1", f"s1:sample:{number}", 0)) for number in range(clients)]
        for client in all_clients:
            newest = _remember(database, client.target, before)
            client.cursor = newest if way == "stored" else 0
        try:
            warm_up = Run(store, way, memory, samples // 5)
            await asyncio.gather(*(warm_up.serve(client, in_flight) for client in all_clients))
            run = Run(store, way, memory, samples)
            used, began = _cpu_s(), time.perf_counter()
            await asyncio.gather(*(run.serve(client, in_flight) for client in all_clients))
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
    rows_found = []
    for clients, in_flight, before in SETTINGS:
        results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                results[way].append(uvloop.run(measure(way, clients, in_flight, before, samples)))
        for way in WAYS:
            row: dict[str, Any] = {"way": way, "clients": clients, "in_flight": in_flight, "before": before}
            row |= {name: round(_median(result[name] for result in results[way]), 3) for name in results[way][0]}
            costs = [result["cpu_s_per_1000"] for result in results[way]]
            row["cpu_range"] = [round(min(costs), 3), round(max(costs), 3)]
            print(json.dumps(row), flush=True)
            rows_found.append(row)
    return rows_found


def through_server(rounds: int) -> list[dict[str, Any]]:
    """The same comparison on a real server with the null upstream: one client with 64 samples in flight, and 64 clients
    with 8 each."""
    with NullUpstream() as upstream, gateway(upstream.url) as server:
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
    options = parser.parse_args()
    rows_found = through_server(options.rounds) if options.server else compare(options.rounds, options.samples)
    if options.out is not None:
        options.out.write_text(json.dumps(rows_found, indent=1) + "\n")
