"""Thousands of long polls, as clients with the Tinker SDK send them, and what else such clients send.

Samples are submitted on at most 400 connections. Then each is polled for on a connection of its own, as from the SDK's
own pool for polls: again at once after 408 and after 500 and above, after 1, 2, 4 s up to 30 s when the connection
broke or after 429. Beside that, samples that the upstream answers at once arrive by the clock, and heartbeats from a
process of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.connection import Connection
from benchmarks.samples import HEADERS, LoadSpec, TinkerSamples

SUBMITTING = 400
POLLS_PER_S = 1500
LONGEST_WAIT_S = 30.0
AWAY_S = 2.0
"""How long nobody can connect after all connections have broken."""
SDK_HEADERS = HEADERS + b"".join(
    b"%s: %s\r\n" % header
    for header in (
        (b"User-Agent", b"AsyncTinker/Python 0.38.0"),
        (b"Accept-Encoding", b"gzip, deflate, zstd"),
        (b"X-Stainless-Lang", b"python"),
        (b"X-Stainless-Package-Version", b"0.38.0"),
        (b"X-Stainless-OS", b"Linux"),
        (b"X-Stainless-Arch", b"x64"),
        (b"X-Stainless-Runtime", b"CPython"),
        (b"X-Stainless-Runtime-Version", b"3.11.2"),
        (b"X-Stainless-Async", b"async:asyncio"),
        (b"x-stainless-retry-count", b"0"),
        (b"x-stainless-read-timeout", b"45"),
        (b"X-Idempotency-Key", b"stainless-python-retry-00000000-0000-4000-8000-000000000000"),
        (b"X-Tinker-Request-Type", b"Sample"),
        (b"X-Tinker-Request-Iteration", b"1"),
    )
)


@dataclass(frozen=True)
class PollSpec:
    """`pid`: the launcher. `samples_per_s` are beside the polls."""

    url: str
    upstream: str
    pid: int
    polls: int = 8192
    sessions: int = 1000
    samples_per_s: float = 50.0
    quick: bool = False


@dataclass
class Phase:
    """What happened in one phase: the heartbeats that were answered in it, and how late they were sent."""

    name: str
    began: float = field(default_factory=time.perf_counter)
    beats: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    polls: Counter[str] = field(default_factory=Counter)
    """By status, or by the name of the error."""
    errors: Counter[str] = field(default_factory=Counter)


class Clients:
    def __init__(self, spec: PollSpec) -> None:
        self._spec = spec
        self._samples = TinkerSamples(LoadSpec(spec.url, "tinker", spec.polls, 0.0))
        address = urlsplit(spec.url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self.phase = Phase("open")
        self._away_until = 0.0
        self._submitted: dict[int, bytes] = {}
        """The bodies of the polls by the samples' numbers."""
        self._polling: dict[int, Connection] = {}
        self._futures: set[asyncio.Task[None]] = set()
        self._free: list[Connection] = []
        self._beside: set[asyncio.Task[None]] = set()
        """Samples beside the polls that have not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._next = spec.polls

    async def open(self) -> None:
        await self._samples.open()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Beside the polls.

    async def beats(self, answered: asyncio.StreamReader) -> None:
        """Note the heartbeats that `polls_beats` prints, until cancelled."""
        while line := await answered.readline():
            late_s, spent_s, problem = json.loads(line)
            self.phase.late_s.append(late_s)
            self.phase.beats.append(spent_s)
            if problem is not None:
                self.phase.errors[f"heartbeat {problem}"] += 1

    async def _sample(self) -> None:
        phase, began = self.phase, time.perf_counter()
        connection = self._free.pop() if self._free else self._samples.connect()
        number, self._next = self._next, self._next + 1
        try:
            problem = await self._samples.sample(connection, number)
        except OSError as error:
            problem = type(error).__name__
            connection.close()
        if problem is not None:
            phase.errors[f"sample {problem}"] += 1
        phase.samples.append(time.perf_counter() - began)
        self._free.append(connection)

    async def arriving(self) -> None:
        """Samples beside the polls, until cancelled."""
        begin = time.perf_counter()
        for number in range(10**9):
            await asyncio.sleep(max(0.0, begin + number / self._spec.samples_per_s - time.perf_counter()))
            self._beside.add(task := self.spawn(self._sample()))
            task.add_done_callback(self._beside.discard)

    async def none_beside(self) -> None:
        """Wait until the samples beside the polls have ended."""
        if self._beside:
            await asyncio.wait(self._beside, timeout=10)

    # The polls.

    async def submit(self) -> None:
        """Submit all samples that are polled for later."""
        numbers = iter(range(self._spec.polls))
        await asyncio.gather(*(self._submit(numbers) for _ in range(SUBMITTING)))

    async def _submit(self, numbers: Iterator[int]) -> None:
        connection = self._samples.connect()
        for number in numbers:
            poll, problem = await self._samples.submit(connection, number)
            if poll is None:
                self.phase.errors[problem or ""] += 1
            else:
                self._submitted[number] = poll
        connection.close()

    async def _poll(self, number: int, poll: bytes, wait_s: float) -> None:
        """One future of the SDK: `_APIFuture._result_async`."""
        await asyncio.sleep(wait_s)
        connection, broken = None, 0
        while True:
            if connection is None:
                connection = self._polling[number] = Connection(self._host, self._port, SDK_HEADERS)
            try:
                if time.perf_counter() < self._away_until:
                    raise ConnectionRefusedError
                status, answer = await connection.post(b"/api/v1/retrieve_future", poll)
            except OSError as error:
                self.phase.polls[type(error).__name__] += 1
                connection.close()
                connection, status, answer = None, 0, b""
            else:
                self.phase.polls[str(status)] += 1
            if status in (0, 429):
                await asyncio.sleep(min(2**broken, LONGEST_WAIT_S))
                broken += 1
                continue
            broken = 0
            if status == 200 or 400 <= status < 500 and status != 408:
                problem = self._samples.problem(number, status, answer)
                if problem is not None:
                    self.phase.errors[problem] += 1
                del self._polling[number]
                return

    def poll_for_all(self) -> float:
        """They come by the clock, as their samples were taken on. Returns after how many seconds the last one comes."""
        for place, (number, poll) in enumerate(self._submitted.items()):
            self._futures.add(task := self.spawn(self._poll(number, poll, place / POLLS_PER_S)))
            task.add_done_callback(self._futures.discard)
        return len(self._submitted) / POLLS_PER_S

    def break_all(self) -> None:
        """Every connection of a poll breaks, and nobody can connect for a while: a proxy restarts."""
        self._away_until = time.perf_counter() + AWAY_S
        for connection in self._polling.values():
            connection.lose()

    @property
    def waiting(self) -> int:
        """How many samples that are polled for have no result yet."""
        return len(self._futures)

    async def all_answered(self, within_s: float) -> float:
        """Seconds until no sample waits; NaN if that takes longer than `within_s`."""
        began = time.perf_counter()
        _, waiting = await asyncio.wait([*self._futures, *self._beside], timeout=within_s)
        return float("nan") if waiting else time.perf_counter() - began

    @property
    def lost(self) -> int:
        return self._samples.counts()["lost"]
