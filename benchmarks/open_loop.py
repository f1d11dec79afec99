"""A load by the clock: samples arrive at their times whether or not earlier ones are done, as independent users do."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from benchmarks.connection import Connection
from benchmarks.samples import LoadSpec, TinkerSamples

TICK_S = 0.005
AT_MOST_IN_FLIGHT = 10_000
READ_AGAIN_EVERY = 100
HEARTBEAT_S = 10.0
DRAIN_S = 60.0
IDLE_S = 2.0


@dataclass
class Counts:
    """Of a whole run. `differing` are results whose second reading was not the bytes of the first."""

    read_again: int = 0
    differing: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class OpenLoop:
    """Arrivals at `rate` per second. Every 100th result is read a second time `again_after_s` later.

    `take_latencies` hands out the seconds of the samples that ended since it was last called.
    """

    def __init__(self, spec: LoadSpec, rate: float, again_after_s: float) -> None:
        self._samples = TinkerSamples(spec)
        self._seconds, self._rate, self._again_after_s = spec.seconds, rate, again_after_s
        self._free: deque[tuple[float, Connection]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: deque[tuple[float, bytes, bytes]] = deque()
        self._latencies: list[float] = []
        self.counts = Counts()

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def take_latencies(self) -> list[float]:
        taken, self._latencies = self._latencies, []
        return taken

    def totals(self) -> dict[str, Any]:
        counted = {"read_again": self.counts.read_again, "differing": self.counts.differing}
        return {**self._samples.counts(), **counted, "errors": dict(self.counts.errors)}

    async def run(self) -> None:
        """Until the arrivals are over, every sample has ended and every second reading was made."""
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
        """The one that was used last, so that those too many fall idle."""
        self._close_idle(IDLE_S)
        return self._free.pop()[1] if self._free else self._samples.connect()

    def _close_idle(self, longer_than_s: float) -> None:
        """A server closes idle connections too, and a request that crosses its doing so would be lost."""
        before = time.monotonic() - longer_than_s
        while self._free and self._free[0][0] <= before:
            self._free.popleft()[1].close()

    async def _arrivals(self) -> None:
        """Ends early when more samples are in flight than this process is ready to hold."""
        began, number, total = time.perf_counter(), 0, round(self._seconds * self._rate)
        while number < total:
            due = min(total, int((time.perf_counter() - began) * self._rate) + 1)
            for arriving in range(number, due):
                task = asyncio.create_task(self._one(arriving))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            number = due
            if len(self._tasks) > AT_MOST_IN_FLIGHT:
                self.counts.errors["stopped: the server does not keep up"] += 1
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
            self.counts.errors[problem] += 1
        self._free.append((time.monotonic(), connection))

    async def _sampled(self, connection: Connection, number: int) -> str | None:
        wanted, refused = await self._samples.submit(connection, number)
        if wanted is None:
            return refused
        status, answer = await self._samples.retrieve(connection, wanted)
        if number % READ_AGAIN_EVERY == 0:
            self._again.append((time.monotonic() + self._again_after_s, wanted, _digest(answer)))
        return self._samples.problem(number, status, answer)

    async def _read_again(self) -> None:
        """Ends at an entry without a request, which stands after all others."""
        connection = self._samples.connect()
        while True:
            if not self._again or (self._again[0][1] and self._again[0][0] > time.monotonic()):
                await asyncio.sleep(0.1)
                continue
            _, wanted, digest = self._again.popleft()
            if not wanted:
                connection.close()
                return
            try:
                status, answer = await self._samples.retrieve(connection, wanted)
            except OSError as error:
                self.counts.errors[f"second reading: {type(error).__name__}"] += 1
                continue
            self.counts.read_again += 1
            self.counts.differing += status != 200 or _digest(answer) != digest

    async def _beat(self) -> None:
        connection = self._samples.connect()
        while True:
            try:
                await self._samples.heartbeat(connection)
            except OSError as error:
                self.counts.errors[f"heartbeat: {type(error).__name__}"] += 1
            await asyncio.sleep(HEARTBEAT_S)


def _digest(answer: bytes) -> bytes:
    return hashlib.blake2b(answer, digest_size=16).digest()
