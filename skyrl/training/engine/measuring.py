"""Publishes the engine's metrics: its own, numbers of rows of the database, and vLLM's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl.engine.metrics import EngineMetrics
from skyrl.inference.vllm_client import VllmMetrics
from skyrl.runtime.metrics.files import publishing
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database
from skyrl.storage.db.quotas import sizes
from skyrl.storage.db.repeats import once, repeat

ROWS_S = 10.0
"""How often the numbers of rows are read. Only engines read them, however many API processes there are."""


@asynccontextmanager
async def measuring(runtime: Runtime, database: Database, metrics: EngineMetrics) -> AsyncIterator[None]:
    """Publish while the body runs."""
    role = runtime.config.role

    async def read_rows() -> None:
        gauges = metrics.database
        found = await database.read_async(lambda c: sizes(c, time.time(), role.scope))
        gauges.models.set(found.models)
        gauges.adapters.set(found.adapters)
        gauges.sessions.set(found.sessions)
        gauges.tenants.set(found.tenants)
        gauges.size.set(await asyncio.to_thread(database.size))

    directory, process = runtime.metrics_directory, role.process("engine")
    async with publishing(metrics.registry, process, directory, labels=role.labels) as published:
        work = [
            once("measuring the event loop", metrics.lag.run),
            once("counting rows", read_rows),
            repeat("counting rows", ROWS_S, read_rows),
        ]
        if runtime.replica_urls:
            vllm = VllmMetrics(runtime.replica_urls, runtime.inference_api_key or "", published, role=role)
            work.append(once("publishing vLLM's metrics", vllm.run))
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
