"""The heartbeats of the sessions of `polls`, from a process of their own: that of the polls is busy itself when all
their connections break, and would hear late of the answers.

Usage: python -m benchmarks.polls_beats '{"url": ..., "sessions": 1000}'. Prints an empty line when the sessions are
open, then for each heartbeat a line of JSON: how late it was sent, the seconds from when it was due to its answer, and
what failed, or null. Each session has a connection of its own. Runs until it is killed."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from benchmarks.connection import Connection
from benchmarks.samples import LoadSpec, TinkerSamples

BEAT_S = 10.0
TIMEOUT_S = 10.0
"""Both are the SDK's."""


class Beats:
    def __init__(self, url: str) -> None:
        self._samples = TinkerSamples(LoadSpec(url, "tinker", 1, 0.0))
        self._sessions: list[tuple[Connection, bytes]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, sessions: int) -> None:
        for _ in range(sessions):
            connection = self._samples.connect()
            body = {"session_id": await self._samples.new_session(connection), "type": "session_heartbeat"}
            self._sessions.append((connection, json.dumps(body).encode()))
        print(flush=True)

    async def run(self) -> None:
        """The heartbeats of all sessions, evenly over BEAT_S."""
        begin, step = time.perf_counter(), BEAT_S / len(self._sessions)
        for number in range(10**9):
            due = begin + number * step
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self._running.add(task := asyncio.create_task(self._beat(number % len(self._sessions), due)))
            task.add_done_callback(self._running.discard)

    async def _beat(self, number: int, due: float) -> None:
        (connection, body), problem = self._sessions[number], None
        late_s = time.perf_counter() - due
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, _ = await connection.post(b"/api/v1/session_heartbeat", body)
            if status != 200:
                problem = str(status)
        except OSError as error:
            problem = type(error).__name__
            connection.close()
            self._sessions[number] = self._samples.connect(), body
        print(json.dumps((late_s, time.perf_counter() - due, problem)), flush=True)


async def main(url: str, sessions: int) -> None:
    beats = Beats(url)
    await beats.open(sessions)
    await beats.run()


if __name__ == "__main__":
    uvloop.run(main(**json.loads(sys.argv[1])))
