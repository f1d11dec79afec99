"""The router of `skyrl serve` in front of many fake workers, and its policies with many keys.

`router` starts the real process, registers the workers as the engine does, and sends samples of many adapters.
`policies` calls the policies alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.fake_workers import FakeWorkers, fake_workers
from benchmarks.processes import cpu_seconds, resident_mb
from benchmarks.prompts import prompt
from benchmarks.router_load import Load, measure, request_of
from benchmarks.stage import wait_ready
from skyrl.base.config.loading import load_config
from skyrl.inference.router_members import RouterMembers
from skyrl.router.policies import AdapterAffinity, ConsistentHashing, Policy, RequestFacts
from skyrl.router.worker import Worker
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.runtime import RUNTIME_ENV, Runtime
from skyrl.runtime.processes.supervision import dies_with_parent

ADAPTERS, IN_FLIGHT = 256, 64
KEYS = 100_000
Result = dict[str, Any]


@dataclass(frozen=True)
class RunningRouter:
    url: str
    key: str
    pid: int


@contextmanager
def server_router() -> Generator[RunningRouter]:
    """The router as the launcher starts it."""
    with TemporaryDirectory(prefix="skyrl-scale-") as directory:
        router_url, key = f"http://127.0.0.1:{free_port()}", secrets.token_hex(16)
        runtime = Runtime(load_config({"state_dir": Path(directory)}), Path(directory), router_url, key)
        environment = os.environ | {RUNTIME_ENV: str(runtime.write())}
        command = dies_with_parent([sys.executable, "-m", "skyrl.router.managed"])
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            wait_ready(f"{router_url}/liveness")
            yield RunningRouter(router_url, key, process.pid)
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def members_of(router: RunningRouter) -> AsyncIterator[RouterMembers]:
    members = RouterMembers(router.url, router.key)
    try:
        yield members
    finally:
        await members.close()


def router(workers: int, seconds: float) -> Result:
    """Times, CPU and memory of the router with so many workers."""
    with fake_workers(workers) as fakes, server_router() as running:
        return {"workers": workers} | uvloop.run(_router(running, fakes, seconds))


async def _router(running: RunningRouter, fakes: FakeWorkers, seconds: float) -> Result:
    async with members_of(running) as members:
        began = time.perf_counter()
        await members.update(fakes.urls, [])
        registered = time.perf_counter() - began
        while fakes.order()["/health"] < len(fakes.urls):  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0.005)
        probed = time.perf_counter() - began
    before, probes = cpu_seconds(running.pid), fakes.order()["/health"]
    await asyncio.sleep(seconds)
    idle = (cpu_seconds(running.pid) - before) / seconds
    probes_per_s = (fakes.order()["/health"] - probes) / seconds
    requests = [
        request_of(
            f"{running.url}/v1/completions",
            json.dumps({"model": f"model-{number}@1", "prompt": prompt(number, 512), "max_tokens": 64}).encode(),
            [f"Authorization: Bearer {running.key}", f"X-Session-ID: {number}"],
        )
        for number in range(ADAPTERS)
    ]
    before = cpu_seconds(running.pid)
    load = await measure(Load(requests), f"{running.url}/v1/completions", IN_FLIGHT, seconds)
    used = cpu_seconds(running.pid) - before
    return {
        "register_s": registered,
        "probed_s": probed,
        "idle_cores": idle,
        "probes_per_s": probes_per_s,
        "samples_per_s": load["per_s"],
        "p50_ms": load["p50_ms"],
        "p99_ms": load["p99_ms"],
        "errors": load["errors"],
        "cpu_ms_per_sample": used / load["answers"] * 1e3,
        "resident_mb": resident_mb(running.pid),
    }


def policies(workers: int, keys: int) -> Result:
    """Cost of a choice by session key and by adapter, and how evenly the keys are spread. No request is in flight."""
    pool = [Worker(f"http://10.0.{number // 250}.{number % 250}:8000") for number in range(workers)]
    by_session = [RequestFacts(routing_key=f"session-{number}") for number in range(keys)]
    by_adapter = [RequestFacts(adapter=f"model-{number}@1") for number in range(keys)]
    hashing = ConsistentHashing()
    new_us, taken = _choose(hashing, by_session, pool)
    kept_us, _ = _choose(hashing, by_session[-1000:], pool)
    gone, left = pool[0], tuple(pool[1:])
    moved = 0
    if left:
        _, after = _choose(hashing, by_session, left)
        moved = sum(1 for old, new in zip(taken, after, strict=True) if old is not new and old is not gone)
    adapter_us, homes = _choose(AdapterAffinity(), by_adapter, pool)
    return {
        "workers": workers,
        "keys": keys,
        "new_key_us": new_us,
        "kept_key_us": kept_us,
        "fullest_over_mean": _fullest(taken, workers),
        "moved_besides": moved,
        "adapter_us": adapter_us,
        "adapters_fullest_over_mean": _fullest(homes, workers),
        "kept_mb": _kept_mb(by_session, pool),
    }


def _choose(policy: Policy, facts: list[RequestFacts], pool: Any) -> tuple[float, list[Worker]]:
    began = time.process_time()
    chosen = [policy.choose(each, pool) for each in facts]
    return (time.process_time() - began) / len(facts) * 1e6, chosen


def _fullest(chosen: list[Worker], workers: int) -> float:
    return max(Counter(map(id, chosen)).values()) / (len(chosen) / workers)


def _kept_mb(facts: list[RequestFacts], pool: Any) -> float:
    """What a policy remembers after all these keys."""
    policy = ConsistentHashing()
    policy.choose(facts[0], pool)
    tracemalloc.start()
    try:
        for each in facts:
            policy.choose(each, pool)
        return tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()
