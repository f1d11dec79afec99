"""The database with many sessions: what a heartbeat, a new session and each periodic statement cost, and an API process
at work on such a database.

Each session has one sampling session and one finished request; each tenth has a model, whose adapter its sampling
session samples from. Tenants have TENANT_SESSIONS sessions each. All rows are written directly; everything measured is
the server's own code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
import uvloop
from sqlalchemy import insert

from benchmarks.processes import cpu_seconds, parts_of, peak_resident_mb, resident_mb
from benchmarks.router_load import Load, measure, request_of
from benchmarks.series import quantile
from skyrl.base.types.ids import new_session_id
from skyrl.base.types.kinds import Kind
from skyrl.base.types.lora import LoraSpec
from skyrl.base.types.weights import AdapterVersion, BaseWeights
from skyrl.cli.demo.server import DemoServer
from skyrl.server.api.tokens import tenant_of_key
from skyrl.storage.db import adapter_versions, quotas, retention, runs, session_ends, usage
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.migrate import migrate
from skyrl.storage.db.models import Model, model_values
from skyrl.storage.db.samplers import Sampler, Samplers, samplers
from skyrl.storage.db.sessions import Sessions, models, sessions
from skyrl.storage.db.tables import FutureRow
from skyrl.storage.db.usage_report import last_days, report
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import PostgresServer

TENANT_SESSIONS = 5_000
HEARTBEAT_S = 10.0
"""How often the Tinker SDK sends a heartbeat for its session."""
BATCH = 5_000
IN_FLIGHT = 64
DatabaseKind = Literal["sqlite", "postgres"]
Result = dict[str, Any]
futures = FutureRow.__table__  # type: ignore[attr-defined]


def key_of(number: int) -> str:
    """The API key to which session `number` belongs."""
    return f"tml-scale-{number // TENANT_SESSIONS}"


@contextmanager
def filled(kind: DatabaseKind, count: int) -> Generator[tuple[str, Path, list[str]]]:
    """A database with so many sessions: its URL, the state directory, and the sessions' ids."""
    with TemporaryDirectory(prefix="skyrl-scale-") as directory:
        state_dir = Path(directory)
        if kind == "sqlite":
            url = f"sqlite:///{state_dir / 'skyrl.db'}"
            yield url, state_dir, _fill(url, count)
            return
        server = PostgresServer()
        server.start()
        try:
            url = server.url(server.new_database())
            yield url, state_dir, _fill(url, count)
        finally:
            server.stop()
            server.remove()


def _fill(url: str, count: int) -> list[str]:
    ids: list[str] = []
    with closing(Database(url)) as database:
        migrate(database)
        for start in range(0, count, BATCH):
            rows = [_rows(number) for number in range(start, min(start + BATCH, count))]
            ids += [row["session"]["id"] for row in rows]

            def add(connection: Connection, rows: list[dict[str, Any]] = rows) -> None:
                connection.execute(insert(sessions), [row["session"] for row in rows])
                connection.execute(insert(models), [row["model"] for row in rows if "model" in row])
                connection.execute(insert(samplers), [row["sampler"] for row in rows])
                connection.execute(insert(futures), [row["future"] for row in rows])

            database.write(add)
        if not database.is_sqlite:
            with database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("ANALYZE")
    return ids


def _rows(number: int) -> dict[str, Any]:
    session_id, tenant, now = new_session_id(), tenant_of_key(key_of(number)), time.time()
    model_id, weights = f"{session_id}:0", BaseWeights()
    rows: dict[str, Any] = {}
    if number % 10 == 0:
        weights = AdapterVersion.of(model_id, 1)
        model = Model(model_id, session_id, tenant, "tiny", LoraSpec(8, 32.0, seed=1), None)
        rows["model"] = model_values(model, 0, "ready", sampler_version=1)
    sampler_id = f"{session_id}:sampler:0"
    rows["session"] = {
        "id": session_id,
        "tenant": tenant,
        "status": "active",
        "created_at": now,
        "heartbeat_at": now,
        "sdk_version": "0.38.0",
        "tags": [],
        "user_metadata": {"purpose": "a run"},
        "project_id": None,
        "display_name": None,
    }
    rows["sampler"] = {
        "id": sampler_id,
        "session_id": session_id,
        "tenant": tenant,
        "seq_id": 0,
        "base_model": "tiny",
        "model_path": None,
        "weights": weights,
        "status": "active",
        "created_at": now,
        "size_bytes": None if isinstance(weights, BaseWeights) else 100_000,
        "last_used_at": None if isinstance(weights, BaseWeights) else now,
    }
    rows["future"] = {
        "id": f"{number:012x}{session_id[-24:]}",
        "kind": Kind.EXTERNAL,
        "tenant": tenant,
        "session_id": session_id,
        "sampling_session_id": sampler_id,
        "sample_seq_id": 0,
        "digest": b"0" * 32,
        "body_format": "json",
        "status": "done",
        "result": b"r" * 1500,
        "result_format": "proto",
        "created_at": now,
        "completed_at": now,
        "owner": "server/0",
    }
    return rows


def statements(kind: DatabaseKind, count: int) -> Result:
    """Milliseconds of each statement; medians."""
    with filled(kind, count) as (url, _, ids):
        return {"database": kind, "sessions": count} | uvloop.run(_statements(url, ids))


async def _statements(url: str, ids: list[str]) -> Result:
    with closing(Database(url)) as database:
        writer = GroupCommitWriter(database)
        tenant, now = tenant_of_key(key_of(0)), time.time()
        queries: dict[str, Callable[[Connection], object]] = {
            "over_sessions": session_ends.over_sessions,
            "adapters_held": lambda c: adapter_versions.held(c, now),
            "adapters_idle": lambda c: adapter_versions.idle(c, now - 3600),
            "adapters_in_use": lambda c: adapter_versions.in_use(c, now - 3600, 8),
            "dropped_since": lambda c: adapter_versions.dropped_since(c, now - 600),
            "active_sessions_of_tenant": lambda c: quotas.active_sessions(c, tenant),
            "sampling_sessions_of_tenant": lambda c: quotas.living_samplers(c, tenant),
            "unsaved_bytes": adapter_versions.unsaved_bytes,
            "page_runs": lambda c: runs.runs_of(c, tenant, 100),
            "page_samplers": lambda c: runs.open_samplers(c, tenant, 100),
            "page_usage": lambda c: report(c, *last_days(7), tenant=tenant),
        }
        taken = {
            name: median(_ms(lambda q=query: database.read(q)) for _ in range(3)) for name, query in queries.items()
        }
        changes: dict[str, Callable[[Connection], object]] = {
            "forget_results": lambda c: retention.forget(c, now - 3600),
            "forget_sampling_sessions": lambda c: adapter_versions.forget_closed(c, now - 3600, 250),
            "meter_storage": lambda c: usage.meter_storage(c, time.time()),
            "note_uses": lambda c: adapter_versions.note_uses(c, [f"{each}:sampler:0" for each in ids[::10]], now),
        }
        for name, change in changes.items():
            taken[name] = median([await _ms_async(partial(writer.transact, change)) for _ in range(3)])
        taken |= await _session_costs(database, writer, ids)
        await writer.close()
    return taken


def _ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


async def _ms_async(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return (time.perf_counter() - began) * 1e3


async def _session_costs(database: Database, writer: GroupCommitWriter, ids: list[str]) -> Result:
    own, known = Sessions(database, writer), Samplers(database, writer)
    created = [await _ms_async(lambda n=n: own.create(f"new-{n}", [], None, "0.38.0")) for n in range(20)]
    held = [await own.find(ids[n], tenant_of_key(key_of(n))) for n in range(min(len(ids), 1000))]
    beaten = [session for session in held if session is not None]
    began = time.perf_counter()
    for start in range(0, len(beaten), 64):
        await asyncio.gather(*(own.beat(session) for session in beaten[start : start + 64]))
    beat = (time.perf_counter() - began) / len(beaten) * 1e3
    await own.look(3600)
    looks, stalls = [], []
    for _ in range(3):
        watch = asyncio.create_task(_longest_stall())
        await asyncio.sleep(0)
        looks.append(await _ms_async(lambda: own.look(3600)))
        watch.cancel()
        stalls.append((await asyncio.gather(watch))[0])
    for n in range(len(ids)):  # all sampling sessions in memory, as after a sample from each
        sampler = Sampler(f"{ids[n]}:sampler:0", ids[n], key_of(n), "tiny", None, BaseWeights())
        known._known.keep(sampler)
    ends = [await _ms_async(partial(own.end, session, "finished", None, None)) for session in beaten[:100]]
    forgotten = [_ms(partial(known.forget_session, session.id)) for session in beaten[:20]]
    return {
        "create": median(created),
        "beat_64_at_once": beat,
        "look": median(looks),
        "look_stall": median(stalls),
        "end": median(ends),
        "forget_session": median(forgotten),
    }


async def _longest_stall() -> float:
    """The longest time, in ms, for which a timer of 1 ms was late, until this task is cancelled."""
    worst = 0.0
    try:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - began - 0.001)
    except asyncio.CancelledError:
        return worst * 1e3


def api(kind: DatabaseKind, count: int, seconds: float) -> Result:
    """One API process, a gateway, on a database with so many sessions."""
    with filled(kind, count) as (url, state_dir, ids):
        flags = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", "http://127.0.0.1:9")
        server = DemoServer(state_dir, *flags, *(() if kind == "sqlite" else ("--database-url", url)))
        server.start()
        try:
            started = server.wait_api()
            return {"database": kind, "sessions": count, "start_s": started} | uvloop.run(_api(server, ids, seconds))
        finally:
            server.stop()


async def _api(server: DemoServer, ids: list[str], seconds: float) -> Result:
    pid = parts_of(server.pid)["api"]
    first_mb = resident_mb(pid)
    await asyncio.sleep(6)  # one look at the sessions
    before = cpu_seconds(pid)
    await asyncio.sleep(10)
    idle = (cpu_seconds(pid) - before) / 10
    looked_mb = resident_mb(pid)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, headers={"X-API-Key": key_of(0)}) as client:
        ready = [await _ms_async(lambda: client.get("/readyz")) for _ in range(3)]
        page = [await _ms_async(lambda: client.get("/ui/api/state")) for _ in range(5)]
    url = f"{server.url}/api/v1/session_heartbeat"
    beats = [
        request_of(url, b'{"session_id": "%s"}' % each.encode(), [f"X-API-Key: {key_of(number)}"])
        for number, each in enumerate(ids)
    ]
    # The first heartbeat of a session reads it from the database, as after a start; later ones find it in memory.
    first = await _beats(pid, url, beats, min(seconds, len(beats) / 4000))
    again = await _beats(pid, url, beats[: int(first["answers"])], seconds)
    return {
        "first_mb": first_mb,
        "looked_mb": looked_mb,
        "peak_mb": peak_resident_mb(pid),
        "idle_cores": idle,
        "readyz_ms": max(ready),
        "page_ms": quantile(page, 0.5),
        "first_beats": first,
        "beats": again,
        "sessions_at_10_s": again["per_s"] * HEARTBEAT_S,
    }


async def _beats(pid: int, url: str, beats: list[bytes], seconds: float) -> dict[str, float]:
    before = cpu_seconds(pid)
    load = await measure(Load(beats), url, IN_FLIGHT, seconds)
    return load | {"cpu_ms": (cpu_seconds(pid) - before) / load["answers"] * 1e3}
