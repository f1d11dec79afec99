"""A closed-loop load in its own process: a fixed number of samples in flight, each on its own connection, for some
seconds.

The measured window begins and ends when a multiple of the samples in flight has ended. So the samples that are half
done at its begin cost as much as those at its end, and every sample that is counted was paid for once.

`direct` posts to the upstream's /v1/completions; `tinker` posts asample and then retrieve_future until there is a
result. After 429 the load waits and tries again, after 408 it polls again. Every answer is checked. At the end the load
waits for the samples in flight; a sample that was accepted and never delivered counts as `lost`.
Usage: python -m benchmarks.load '{"url": "http://127.0.0.1:8000", ...}' (the fields of LoadSpec); prints JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from operator import sub
from typing import Any, NamedTuple

import uvloop

from benchmarks.processes import busy_seconds, cpu_seconds
from benchmarks.samples import DirectSamples, LoadSpec, TinkerSamples
from benchmarks.series import quantile

WARM_UP_AT_MOST_S = 15.0
DRAIN_S = 30.0
LONGEST_WAVE_S = 10.0
"""A wave that takes longer is not waited for: then an upstream has lost samples."""
PAUSE_AFTER_ERROR_S = 0.1
KINDS = {"direct": DirectSamples, "tinker": TinkerSamples}


class Cpu(NamedTuple):
    """CPU seconds so far of the processes of a load, and of the whole machine."""

    server_s: float
    generator_s: float
    upstream_s: float
    machine_s: float


class ClosedLoop:
    """Workers that each keep one sample in flight. Only samples that end within the window are measured. A wave is as
    many ended samples as there are workers."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._kind = KINDS[spec.path](spec)
        self._numbers = itertools.count()
        self._measuring = self._stopping = False
        self._edge: asyncio.Future[tuple[Cpu, float]] | None = None
        """Gets CPU and time at the end of the next wave."""
        self._finished = 0
        self._latencies: list[float] = []
        self._errors: Counter[str] = Counter()

    async def _worker(self, index: int) -> None:
        await asyncio.sleep(index / self._spec.in_flight * self._spec.spread_s)
        connection = self._kind.connect()
        while not self._stopping:
            began = time.perf_counter()
            try:
                problem = await self._kind.sample(connection, next(self._numbers))
            except OSError as error:
                problem = type(error).__name__
                connection.close()
            self._finished += 1
            if problem is not None:
                self._errors[problem] += 1
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)
            elif self._measuring:
                self._latencies.append(time.perf_counter() - began)
            if self._edge is not None and self._finished % self._spec.in_flight == 0:
                self._cross(self._edge)
        connection.close()

    def _cross(self, edge: asyncio.Future[tuple[Cpu, float]]) -> None:
        """Begin or end the measured window, now."""
        self._edge = None
        self._measuring = not self._measuring
        edge.set_result((self._cpu(), time.perf_counter()))

    async def _edge_of_window(self) -> tuple[Cpu, float]:
        """CPU and time when the wave has ended, or after LONGEST_WAVE_S."""
        edge = self._edge = asyncio.get_running_loop().create_future()
        await asyncio.wait([edge], timeout=LONGEST_WAVE_S)
        if not edge.done():
            self._cross(edge)
        return edge.result()

    async def _warm_up(self) -> None:
        """Wait until the warm-up time has passed and as many samples have ended as there are workers."""
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < WARM_UP_AT_MOST_S:
            if spent >= self._spec.warm_up_s and self._finished >= self._spec.in_flight:
                return
            await asyncio.sleep(0.05)

    def _cpu(self) -> Cpu:
        pid, upstream = self._spec.pid, self._spec.upstream_pid
        server_s = cpu_seconds(pid) if pid is not None else 0.0
        upstream_s = cpu_seconds(upstream) if upstream is not None else 0.0
        return Cpu(server_s, time.process_time(), upstream_s, busy_seconds())

    async def run(self) -> dict[str, Any]:
        await self._kind.open()
        workers = [asyncio.create_task(self._worker(index)) for index in range(self._spec.in_flight)]
        await self._warm_up()
        cpu, began = await self._edge_of_window()
        await asyncio.sleep(self._spec.seconds)
        cpu_after, ended = await self._edge_of_window()
        self._stopping = True
        _, hanging = await asyncio.wait(workers, timeout=DRAIN_S)
        if hanging:
            self._errors[f"no answer within {DRAIN_S:.0f} s of the end"] += len(hanging)
        for worker in hanging:
            worker.cancel()
        return self._result(ended - began, Cpu(*map(sub, cpu_after, cpu)))

    def _result(self, wall_s: float, cpu: Cpu) -> dict[str, Any]:
        done = len(self._latencies)
        per_1000 = 1000 / done if done else float("nan")
        return {
            "spec": asdict(self._spec),
            "samples": done,
            "wall_s": wall_s,
            "samples_per_s": done / wall_s,
            "p50_ms": quantile(self._latencies, 0.5) * 1e3,
            "p99_ms": quantile(self._latencies, 0.99) * 1e3,
            "server_cpu_s_per_1000": cpu.server_s * per_1000,
            "server_cores": cpu.server_s / wall_s,
            "generator_cpu_s_per_1000": cpu.generator_s * per_1000,
            "generator_cores": cpu.generator_s / wall_s,
            "foreign_cores": max(0.0, cpu.machine_s - cpu.server_s - cpu.generator_s - cpu.upstream_s) / wall_s,
            "errors": dict(self._errors),
            **self._kind.counts(),
        }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(ClosedLoop(LoadSpec(**json.loads(sys.argv[1]))).run())))
