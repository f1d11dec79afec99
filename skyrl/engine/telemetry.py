"""The engine's metrics and traces.

Metrics are the engine's own, numbers of rows of the database, and vLLM's. A trace has spans of commands: how long each
waited, ran, and was repeated after a restart. The trace is stored with the command, so that the spans of every engine
that works on the command join the same trace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl.base.types.requests import Command
from skyrl.engine.metrics import EngineMetrics
from skyrl.inference.vllm_client import VllmMetrics
from skyrl.runtime.metrics.files import publishing
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.tracing import RequestTrace, Spans, stored_context
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
            vllm = VllmMetrics(runtime, runtime.replica_urls, published)
            work.append(once("publishing vLLM's metrics", vllm.run))
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class CommandTracing:
    """`spans` is None where nothing is traced. Times are in seconds since the epoch."""

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans

    def ran(self, command: Command, began_at: float, error: str | None) -> None:
        """A command has run since `began_at`, and is settled."""
        if (trace := self._trace(command)) is None:
            return
        now = time.time_ns()
        began_ns = int(began_at * 1e9)
        trace.record("queue", int(command.accepted_at * 1e9), began_ns, _attributes(command))
        trace.record("run", began_ns, now, _attributes(command), error)

    def repeated(self, command: Command, began_at: float) -> None:
        """A command that had run before was repeated since `began_at`, because the engine has restarted."""
        if (trace := self._trace(command)) is not None:
            about = _attributes(command) | {"skyrl.replayed": True}
            trace.record("repeat", int(began_at * 1e9), time.time_ns(), about)

    def _trace(self, command: Command) -> RequestTrace | None:
        if self._spans is None or (context := stored_context(command.trace)) is None:
            return None
        return RequestTrace(self._spans, context)


def _attributes(command: Command) -> dict[str, str | int | bool]:
    about: dict[str, str | int | bool] = {"skyrl.request_id": command.request_id, "skyrl.kind": str(command.kind)}
    if command.model_id is not None:
        about["skyrl.model_id"] = command.model_id
    if command.seq_id is not None:
        about["skyrl.seq_id"] = command.seq_id
    return about
