"""Times another route while many long polls wait, and checks that all polls are answered in the end.

Usage: python -m benchmarks.waiting '{"url": ..., "in_flight": 2048, ...}' UPSTREAM_URL; prints JSON. The null upstream
there delays its answers until this program releases them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.connection import Connection
from benchmarks.samples import LoadSpec, TinkerSamples
from benchmarks.series import quantile

BEATS_PER_S = 100
IDLE_S = 4.0
SUBMIT_S = 30.0


class Waiting:
    """Submits all samples first. Then their polls wait while heartbeats are timed."""

    def __init__(self, spec: LoadSpec, upstream: str) -> None:
        self._spec = spec
        self._samples = TinkerSamples(spec)
        address = urlsplit(upstream)
        self._upstream = Connection(address.hostname or "127.0.0.1", address.port or 80, b"")
        self._errors: Counter[str] = Counter()

    async def _submit(self, connection: Connection, number: int) -> bytes | None:
        """The body of the poll for the result; None after a fault."""
        try:
            poll, problem = await self._samples.submit(connection, number)
        except OSError as error:
            poll, problem = None, type(error).__name__
        self._count(problem)
        return poll

    async def _retrieve(self, connection: Connection, number: int, poll: bytes | None) -> None:
        if poll is None:
            return
        try:
            problem = self._samples.problem(number, *await self._samples.retrieve(connection, poll))
        except OSError as error:
            problem = type(error).__name__
        self._count(problem)
        connection.close()

    def _count(self, problem: str | None) -> None:
        if problem is not None:
            self._errors[problem] += 1

    async def _beats(self, for_s: float) -> list[float]:
        """Send heartbeats one after the other at a steady pace for `for_s`; returns the seconds of each."""
        connection, seconds = self._samples.connect(), []
        end = time.perf_counter() + for_s
        while (began := time.perf_counter()) < end:
            status = await self._samples.heartbeat(connection)
            seconds.append(time.perf_counter() - began)
            self._count(None if status == 200 else f"heartbeat {status}")
            await asyncio.sleep(max(0.0, 1 / BEATS_PER_S - seconds[-1]))
        connection.close()
        return seconds

    async def run(self) -> dict[str, Any]:
        await self._samples.open()
        idle = await self._beats(IDLE_S)
        numbered = [(self._samples.connect(), number) for number in range(self._spec.in_flight)]
        async with asyncio.timeout(SUBMIT_S):
            polls = await asyncio.gather(*(self._submit(*each) for each in numbered))
        both = zip(numbered, polls, strict=True)
        tasks = [asyncio.create_task(self._retrieve(*each, poll)) for each, poll in both]
        await asyncio.sleep(1.0)
        waiting = sum(not task.done() for task in tasks)
        seconds = await self._beats(self._spec.seconds)
        await self._upstream.post(b"/control?release", b"")
        _, hanging = await asyncio.wait(tasks, timeout=60)
        if hanging:
            self._errors["no result"] += len(hanging)
        return {
            "waiting": waiting,
            "beats": len(seconds),
            "p50_ms": quantile(seconds, 0.5) * 1e3,
            "p99_ms": quantile(seconds, 0.99) * 1e3,
            "idle_p50_ms": quantile(idle, 0.5) * 1e3,
            "idle_p99_ms": quantile(idle, 0.99) * 1e3,
            "errors": dict(self._errors),
            **self._samples.counts(),
        }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(Waiting(LoadSpec(**json.loads(sys.argv[1])), sys.argv[2]).run())))
