"""A closed-loop load in its own process: a fixed number of samples in flight, each on its own connection, for some
seconds.

`direct` posts to the upstream's /v1/completions; `tinker` posts asample and then retrieve_future until there is a
result; `one-poll` learns of all ended samples by retrieve_futures. After 429 the load waits and tries again, after 408
it polls again. Every answer is checked. At the end the load waits for the samples in flight; a sample that was accepted
and never delivered counts as `lost`.
Usage: python -m benchmarks.load '{"url": "http://127.0.0.1:8000", ...}' (the fields of LoadSpec); prints JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, astuple, dataclass
from typing import Any

import uvloop

from benchmarks.processes import busy_seconds, cpu_seconds
from benchmarks.samples import DirectSamples, LoadSpec, OnePollSamples, TinkerSamples
from benchmarks.series import curve, quantile

WARM_UP_AT_MOST_S = 15.0
DRAIN_S = 30.0
PAUSE_AFTER_ERROR_S = 0.1
KINDS = {"direct": DirectSamples, "tinker": TinkerSamples, "one-poll": OnePollSamples}


@dataclass(frozen=True)
class Cpu:
    """CPU seconds so far of the processes of a load, and of the whole machine."""

    server_s: float
    generator_s: float
    upstream_s: float
    machine_s: float

    def since(self, before: Cpu) -> Cpu:
        return Cpu(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def foreign_s(self) -> float:
        """CPU seconds of all other processes of the machine. A large value means a disturbed measurement."""
        return max(0.0, self.machine_s - self.server_s - self.generator_s - self.upstream_s)


class ClosedLoop:
    """Workers that each keep one sample in flight. Only samples that end within the window are measured."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._kind = KINDS[spec.path](spec)
        self._numbers = itertools.count()
        self._measuring = self._stopping = False
        self._finished = 0
        self._latencies: list[float] = []
        self._errors: Counter[str] = Counter()

    async def _worker(self) -> None:
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
        connection.close()

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
        return Cpu(
            server_s, time.process_time(), cpu_seconds(upstream) if upstream is not None else 0.0, busy_seconds()
        )

    async def run(self) -> dict[str, Any]:
        await self._kind.open()
        workers = [asyncio.create_task(self._worker()) for _ in range(self._spec.in_flight)]
        await self._warm_up()
        cpu, began = self._cpu(), time.perf_counter()
        self._measuring = True
        await asyncio.sleep(self._spec.seconds)
        self._measuring = False
        wall_s, cpu_after = time.perf_counter() - began, self._cpu()
        self._stopping = True
        _, hanging = await asyncio.wait(workers, timeout=DRAIN_S)
        if hanging:
            self._errors[f"no answer within {DRAIN_S:.0f} s of the end"] += len(hanging)
        for worker in hanging:
            worker.cancel()
        return self._result(wall_s, cpu_after.since(cpu))

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
            "foreign_cores": cpu.foreign_s / wall_s,
            "errors": dict(self._errors),
            **self._kind.counts(),
            "latency_curve_ms": [value * 1e3 for value in curve(self._latencies)],
        }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(ClosedLoop(LoadSpec(**json.loads(sys.argv[1]))).run())))
