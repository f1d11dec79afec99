"""Takes the clients of `polls_clients` through the phases of `polls`, and prints a line of JSON for each.

Usage: python -m benchmarks.polls_load '{"url": ..., "upstream": ..., "pid": ..., "polls": 8192}'."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvloop

from benchmarks.polls_clients import Clients, Phase, PollSpec
from benchmarks.processes import cpu_seconds, parts_of, resident_mb
from benchmarks.series import quantile

LONGER_THAN_A_POLL_S = 35.0
AFTER_S, QUICK_S = 20.0, 8.0
ANSWERED_S = 90.0
HELD_BACK = "delay_ms=600000"


class Phases:
    def __init__(self, spec: PollSpec) -> None:
        self._spec = spec
        self._clients = Clients(spec)
        self._control = httpx.AsyncClient(trust_env=False, timeout=30)

    def _api(self) -> int:
        return parts_of(self._spec.pid)["api"]

    @asynccontextmanager
    async def _in_phase(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Prints what happened inside, with what is put into the dictionary."""
        self._clients.phase = phase = Phase(name)
        api = self._api()
        cpu, own = cpu_seconds(api), time.process_time()
        more: dict[str, Any] = {}
        yield more
        seconds = time.perf_counter() - phase.began
        now = self._api()
        found = {
            "phase": name,
            "seconds": seconds,
            "beats": len(phase.beats),
            "beat_p50_ms": quantile(phase.beats, 0.5) * 1e3,
            "beat_p99_ms": quantile(phase.beats, 0.99) * 1e3,
            "beat_max_ms": max(phase.beats, default=0.0) * 1e3,
            "late_p99_ms": quantile(phase.late_s, 0.99) * 1e3,
            "sample_p50_ms": quantile(phase.samples, 0.5) * 1e3,
            "sample_p99_ms": quantile(phase.samples, 0.99) * 1e3,
            "polls": dict(phase.polls),
            "errors": dict(phase.errors),
            "api_cores": (cpu_seconds(now) - (cpu if now == api else 0.0)) / seconds,
            "generator_cores": (time.process_time() - own) / seconds,
            "api_mb": resident_mb(now),
        }
        print(json.dumps(found | more), flush=True)

    async def _upstream(self, query: str) -> int:
        """How many answers the upstream holds back."""
        return (await self._control.post(f"{self._spec.upstream}/control?{query}")).raise_for_status().json()["waiting"]

    async def run(self) -> None:
        clients = self._clients
        await clients.open()
        spec = json.dumps({"url": self._spec.url, "sessions": self._spec.sessions})
        command = (sys.executable, "-m", "benchmarks.polls_beats", spec)
        beating = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert beating.stdout
        try:
            await beating.stdout.readline()
            clients.spawn(clients.beats(beating.stdout))
            await self._all_phases(clients, quick=self._spec.quick)
        finally:
            beating.kill()
            await beating.wait()
            await self._control.aclose()

    async def _all_phases(self, clients: Clients, *, quick: bool) -> None:
        arriving = clients.spawn(clients.arriving())
        async with self._in_phase("no polls"):
            await asyncio.sleep(QUICK_S)
        arriving.cancel()
        await clients.none_beside()
        await self._upstream(HELD_BACK)
        async with self._in_phase("submit"):
            await clients.submit()
        await self._all_held_back()
        arriving = clients.spawn(clients.arriving())
        before_mb = resident_mb(self._api())
        async with self._in_phase("settle"):
            await asyncio.sleep(clients.poll_for_all() + 2)
        async with self._in_phase("waiting") as more:
            await asyncio.sleep(QUICK_S if quick else LONGER_THAN_A_POLL_S)
            more["kb_per_poll"] = (resident_mb(self._api()) - before_mb) * 1e3 / self._spec.polls
        async with self._in_phase("broken"):
            clients.break_all()
            await asyncio.sleep(QUICK_S if quick else AFTER_S)
        arriving.cancel()
        await clients.none_beside()
        await self._upstream(HELD_BACK)
        async with self._in_phase("killed") as more:
            os.kill(self._api(), signal.SIGKILL)
            await asyncio.sleep(QUICK_S if quick else AFTER_S)
            more["waiting"] = clients.waiting
        async with self._in_phase("answered") as more:
            await self._upstream("delay_ms=0&release")
            more["answered_s"] = await clients.all_answered(ANSWERED_S)
            more["lost"] = clients.lost

    async def _all_held_back(self) -> None:
        """Wait until the upstream has all samples, then let it answer others at once."""
        for _ in range(100):
            if await self._upstream("") < self._spec.polls:
                await asyncio.sleep(0.1)
        await self._upstream("delay_ms=0")


if __name__ == "__main__":
    uvloop.run(Phases(PollSpec(**json.loads(sys.argv[1]))).run())
