"""An open-loop load: samples arrive by the clock, whether or not earlier samples have ended, as those of independent
users do.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from typing import Any

from benchmarks.connection import Connection
from benchmarks.samples import LoadSpec, TinkerSamples

TICK_S = 0.005
AT_MOST_IN_FLIGHT = 10_000
READ_AGAIN_EVERY = 100
HEARTBEAT_S = 10.0
DRAIN_S = 60.0
IDLE_S = 2.0


class OpenLoop:
    """Samples arrive at `rate` per second. Every 100th result is read a second time after `again_after_s`.

    `take_latencies` returns the seconds of the samples that ended since the last call. `totals` counts the whole run;
    `differing` are results whose second reading gave other bytes than the first.
    """

    def __init__(self, spec: LoadSpec, rate: float, again_after_s: float) -> None:
        self._samples = TinkerSamples(spec)
        self._seconds, self._rate, self._again_after_s = spec.seconds, rate, again_after_s
        self._free: deque[tuple[float, Connection]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: deque[tuple[float, bytes, bytes]] = deque()
        self._latencies: list[float] = []
        self._read_twice = self._differing = 0
        self._errors: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def take_latencies(self) -> list[float]:
        taken, self._latencies = self._latencies, []
        return taken

    def totals(self) -> dict[str, Any]:
        counted = {"read_again": self._read_twice, "differing": self._differing}
        return {**self._samples.counts(), **counted, "errors": dict(self._errors)}

    async def run(self) -> None:
        """Returns after the last arrival, when every sample has ended and every second reading is made."""
        await self._samples.open()
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(self._beat())
            rereading = group.create_task(self._read_again())
            await self._arrivals()
            if self._tasks:
                _, hanging = await asyncio.wait(self._tasks, timeout=DRAIN_S)
                for task in hanging:
                    task.cancel()
            self._again.append((0.0, b"", b""))
            await rereading
            beating.cancel()
        self._close_idle(0.0)

    def _connection(self) -> Connection:
        """The free connection that was used last, or a new one. So surplus connections stay idle and are closed."""
        self._close_idle(IDLE_S)
        return self._free.pop()[1] if self._free else self._samples.connect()

    def _close_idle(self, longer_than_s: float) -> None:
        """Close idle connections before the server does: a request sent while the server closes would be lost."""
        before = time.monotonic() - longer_than_s
        while self._free and self._free[0][0] <= before:
            self._free.popleft()[1].close()

    async def _arrivals(self) -> None:
        """Start samples at their times. Ends early if more than AT_MOST_IN_FLIGHT samples are in flight."""
        began, number, total = time.perf_counter(), 0, round(self._seconds * self._rate)
        while number < total:
            due = min(total, int((time.perf_counter() - began) * self._rate) + 1)
            for arriving in range(number, due):
                task = asyncio.create_task(self._one(arriving))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            number = due
            if len(self._tasks) > AT_MOST_IN_FLIGHT:
                self._errors["stopped: the server does not keep up"] += 1
                return
            await asyncio.sleep(TICK_S)

    async def _one(self, number: int) -> None:
        connection = self._connection()
        began = time.perf_counter()
        try:
            problem = await self._sampled(connection, number)
        except OSError as error:
            problem = type(error).__name__
            connection.close()
        if problem is None:
            self._latencies.append(time.perf_counter() - began)
        else:
            self._errors[problem] += 1
        self._free.append((time.monotonic(), connection))

    async def _sampled(self, connection: Connection, number: int) -> str | None:
        poll, problem = await self._samples.submit(connection, number)
        if poll is None:
            return problem
        status, answer = await self._samples.retrieve(connection, poll)
        if number % READ_AGAIN_EVERY == 0:
            self._again.append((time.monotonic() + self._again_after_s, poll, _digest(answer)))
        return self._samples.problem(number, status, answer)

    async def _read_again(self) -> None:
        """Read results again when they are due. An empty entry at the end of the queue ends this task."""
        connection = self._samples.connect()
        while True:
            if not self._again or (self._again[0][1] and self._again[0][0] > time.monotonic()):
                await asyncio.sleep(0.1)
                continue
            _, poll, digest = self._again.popleft()
            if not poll:
                connection.close()
                return
            try:
                status, answer = await self._samples.retrieve(connection, poll)
            except OSError as error:
                self._errors[f"second reading: {type(error).__name__}"] += 1
                continue
            self._read_twice += 1
            self._differing += status != 200 or _digest(answer) != digest

    async def _beat(self) -> None:
        connection = self._samples.connect()
        while True:
            try:
                await self._samples.heartbeat(connection)
            except OSError as error:
                self._errors[f"heartbeat: {type(error).__name__}"] += 1
            await asyncio.sleep(HEARTBEAT_S)


def _digest(answer: bytes) -> bytes:
    return hashlib.blake2b(answer, digest_size=16).digest()
