"""The engine's periodic work reads open rows only, however many ended sampling sessions and old versions there are.

The tests check the statements and their query plans, which do not depend on the speed of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, func, insert, select, text

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine.sweeping import FileSweeper
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db import adapter_versions, retention
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.retention import SAMPLING_SESSIONS_S, Retention
from skyrl.storage.db.session_ends import end_sessions
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH

SESSIONS = 3000
OLD, EACH = 40, 200
"""The number of ended sessions with sampling sessions, and the number of sampling sessions in each."""
MODEL = "s0:train:0"
LONG_AGO = time.time() - 1e6

Sent = list[tuple[str, Any]]


@pytest.fixture
def config(tmp_path: Path, migrated_url: str) -> ServerConfig:
    return load_config({"state_dir": tmp_path, "database_url": migrated_url})


@pytest.fixture
def database(config: ServerConfig) -> Iterator[Database]:
    database = Database(config.database)
    yield database
    database.close()


@contextmanager
def listening(database: Database) -> Iterator[Sent]:
    """Records the statements that are sent inside the block, with their parameters."""
    sent: Sent = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        sent.append((statement, parameters))

    for engine in {database.reader, database.writer}:
        event.listen(engine, "before_cursor_execute", note)
    yield sent
    for engine in {database.reader, database.writer}:
        event.remove(engine, "before_cursor_execute", note)


def session(number: int, status: str) -> dict[str, Any]:
    now = {"created_at": LONG_AGO, "heartbeat_at": LONG_AGO}
    return {"id": f"s{number}", "tenant": "t", "status": status, "sdk_version": "", "tags": [], **now}


def sampler(session_id: str, number: int, model_id: str, status: str) -> dict[str, Any]:
    return {
        "id": f"{session_id}:sample:{number}",
        "session_id": session_id,
        "tenant": "t",
        "seq_id": number,
        "base_model": "tiny",
        "weights": AdapterVersion.of(model_id, number),
        "status": status,
        "created_at": LONG_AGO,
        "size_bytes": 1,
        "last_used_at": time.time(),
        "closed_at": None if status == "active" else LONG_AGO,
    }


def fill(database: Database, open_versions: int) -> None:
    """A long history of ended sessions, and one open session with `open_versions` versions."""
    history = [
        sampler(f"s{number}", each, f"s{number}:train:0", "closed")
        for number in range(1, OLD + 1)
        for each in range(EACH)
    ]
    living = [sampler("s0", number, MODEL, "active") for number in range(1, open_versions + 1)]
    shape = {"lora_rank": 8, "lora_alpha": 32, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
    model = {"id": MODEL, "session_id": "s0", "tenant": "t", "model_seq_id": 0, "base_model": "tiny", "status": "ready"}
    model |= {"sampler_version": open_versions, "next_seq": 0, "created_at": LONG_AGO, "last_request_at": LONG_AGO}

    def change(connection: Connection) -> None:
        connection.execute(insert(sessions), [session(n, "finished" if n else "active") for n in range(SESSIONS)])
        connection.execute(insert(models), model | shape)
        connection.execute(insert(samplers), history + living)

    database.write(change)
    if not database.is_sqlite:  # PostgreSQL plans by statistics, which autovacuum maintains on a real server
        database.write(lambda c: c.execute(text("ANALYZE")))


def plans(database: Database, sent: Sent) -> str:
    """The query plans of these statements."""
    explain = "EXPLAIN QUERY PLAN" if database.is_sqlite else "EXPLAIN"

    def ask(connection: Connection) -> list[str]:
        lines = []
        for statement, parameters in sent:
            if statement.startswith(("SELECT", "UPDATE", "DELETE", "WITH")) and "pg_advisory" not in statement:
                lines += [str(row) for row in connection.exec_driver_sql(f"{explain} {statement}", parameters)]
        return lines

    return "\n".join(database.read(ask))


def assert_reads_no_history(database: Database, sent: Sent) -> None:
    assert sent
    for line in plans(database, sent).splitlines():
        for table in ("sampling_sessions", "sessions"):
            assert f"Seq Scan on {table}" not in line, line
            assert not (f"SCAN {table}" in line and "INDEX ix_sampling_sessions_" not in line), line


def on_disk(config: ServerConfig, versions: int) -> None:
    for number in range(1, versions + 1):
        directory = version_directory(config.state_dir, AdapterVersion.of(MODEL, number))
        directory.mkdir(parents=True)
        os.utime(directory, (LONG_AGO, LONG_AGO))


@ON_BOTH
def test_ending_sessions_reads_open_rows_only(database: Database) -> None:
    fill(database, 50)
    with listening(database) as sent:
        assert end_sessions(database).model_ids == []
    assert len([s for s, _ in sent if s.startswith("SELECT")]) == 1
    assert_reads_no_history(database, sent)
    database.write(lambda c: c.execute(sessions.update().where(sessions.c.id == "s0").values(status="expired")))
    assert end_sessions(database).model_ids == [MODEL]
    left = select(func.count()).select_from(samplers).where(samplers.c.status == "active")
    assert database.read(lambda c: c.execute(left).scalar_one()) == 0


@ON_BOTH
@pytest.mark.parametrize("versions", [10, 600])
def test_sweeping_adapters_sends_the_same_statements_for_few_and_for_many_versions(
    database: Database, config: ServerConfig, versions: int
) -> None:
    fill(database, versions)
    on_disk(config, versions)
    sweeper = FileSweeper(config, database, open_store(config))
    with listening(database) as sent:
        sweeper.drop_idle()
        assert sweeper.unused_adapters(set()) == []
    assert len([s for s, _ in sent if "sampling_sessions" in s]) == 2
    assert_reads_no_history(database, sent)
    old = samplers.c.session_id == "s0"
    database.write(lambda c: c.execute(samplers.update().where(old).values(status="closed", closed_at=LONG_AGO)))
    with listening(database) as sent:
        found = sweeper.unused_adapters(set())
    assert len(found) == min(versions, adapter_versions.MAX_NAMED), "the next call returns the remaining versions"
    assert len([s for s, _ in sent if "sampling_sessions" in s]) == 2


@ON_BOTH
def test_finding_idle_and_dropped_versions_reads_those_rows_only(database: Database) -> None:
    fill(database, 50)
    now = time.time()
    looks: tuple[Callable[[Connection], object], ...] = (
        lambda c: adapter_versions.idle(c, now - 3600),
        lambda c: adapter_versions.dropped_since(c, now - 600),
        lambda c: adapter_versions.unsaved_bytes(c, "t"),
        lambda c: adapter_versions.in_use(c, now - 600, 8),
    )
    for look in looks:
        with listening(database) as sent:
            database.read(look)
        assert_reads_no_history(database, sent)


@ON_BOTH
async def test_sampling_sessions_are_deleted_a_day_after_the_end_of_their_session(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FORGET_ROWS", 1000)
    fill(database, 50)
    now = time.time()

    def of(session_id: str) -> int:
        mine = select(func.count()).select_from(samplers).where(samplers.c.session_id == session_id)
        return database.read(lambda c: c.execute(mine).scalar_one())

    closings = {"s1": now - SAMPLING_SESSIONS_S + 60, "s2": now - SAMPLING_SESSIONS_S - 60}
    for session_id, closed_at in closings.items():
        change = samplers.update().where(samplers.c.session_id == session_id).values(closed_at=closed_at)
        database.write(lambda c, change=change: c.execute(change))
    dropped = samplers.update().where(samplers.c.id == "s0:sample:1").values(status="dropped", closed_at=LONG_AGO)
    database.write(lambda c: c.execute(dropped))
    writer = GroupCommitWriter(database)
    await Retention(database, writer, 3600.0).sweep()
    assert [of(session_id) for session_id in ("s0", "s1", "s2", f"s{OLD}")] == [50, EACH, 0, 0]
    fill_again = samplers.insert()
    database.write(lambda c: c.execute(fill_again, [sampler("s3", n, "m", "active") for n in range(5000)]))
    if not database.is_sqlite:
        database.write(lambda c: c.execute(text("ANALYZE")))
    with listening(database) as sent:
        await Retention(database, writer, 3600.0).sweep()
    await writer.close()
    assert_reads_no_history(database, [(s, p) for s, p in sent if "sampling_sessions" in s])
