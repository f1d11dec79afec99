"""What is old goes in time: rows and files of a server that has run for a week, by statements that read few rows."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Trainer, asleep, data, harness_in, until
from sqlalchemy import Connection, event, func, insert, select, text, update

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.paths import TinkerPath
from skyrl.engine.sweeping import FileSweeper
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db import adapter_versions, retention
from skyrl.storage.db import checkpoints as checkpoint_rows
from skyrl.storage.db import futures as rows
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.checkpoints import Checkpoint
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.retention import SAMPLING_SESSIONS_S, Retention
from skyrl.storage.db.samplers import Sampler, add_sampler
from skyrl.storage.db.session_ends import end_sessions
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH, ON_SQLITE

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
def test_sweeping_adapters_sends_one_more_statement_for_each_500_versions(
    database: Database, config: ServerConfig, versions: int
) -> None:
    fill(database, versions)
    on_disk(config, versions)
    sweeper = FileSweeper(config, database, open_store(config))
    with listening(database) as sent:
        sweeper.drop_idle()
        assert sweeper.unused_adapters() == []
    assert len([s for s, _ in sent if "sampling_sessions" in s]) == (2 if versions == 10 else 3)
    assert_reads_no_history(database, sent)
    old = samplers.c.session_id == "s0"
    database.write(lambda c: c.execute(samplers.update().where(old).values(status="closed", closed_at=LONG_AGO)))
    with listening(database) as sent:
        found = sweeper.unused_adapters()
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


HOUR_S = 3600.0
EVERY_S = 3 * HOUR_S
DAY = 8
"""The number of sessions per day, one every EVERY_S."""
SAMPLES, VERSIONS = 20, 2
"""Samples per session, and adapter versions that the session samples from."""
TTL_S = 6 * HOUR_S
KEPT_BYTES = 4_000
"""Bytes of a session, its model and its sampling sessions, whose rows are kept."""
BODY, RESULT = b"b" * 2900, rows.Outcome(b"r" * 600, "protobuf")


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class Server:
    """One state directory, with one session at a time."""

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self.config, self.clock = config, clock
        self.database = Database(config.database)
        self.writer = GroupCommitWriter(self.database)
        self.retention = Retention(self.database, self.writer, config.result_retention_s)
        self.store = open_store(config)
        self.files = FileSweeper(config, self.database, self.store)

    def run_session(self, session_id: str) -> None:
        """A session that trains, saves for sampling, samples, saves a checkpoint for some hours, and ends."""
        model_id, now = f"{session_id}:train:0", self.clock()
        session = {"id": session_id, "tenant": "t", "status": "active", "created_at": now, "heartbeat_at": now}
        lora = LoraSpec(8, 32.0, 1)
        model = {"id": model_id, "session_id": session_id, "tenant": "t", "model_seq_id": 0, "base_model": "tiny"}
        model |= {"status": "ready", "sampler_version": 0, "next_seq": 0, "created_at": now, "last_request_at": now}
        self.database.write(lambda c: c.execute(insert(sessions), session | {"sdk_version": "", "tags": []}))
        self.database.write(lambda c: c.execute(insert(models), model | lora_values(lora)))
        for version in range(1, VERSIONS + 1):
            adapter = AdapterVersion.of(model_id, version)
            self._write(version_directory(self.config.state_dir, adapter))
            name = f"{session_id}:sample:{version}"
            sampler = Sampler(name, session_id, "t", "tiny", None, adapter)
            self.database.write(lambda c, sampler=sampler, version=version: add_sampler(c, sampler, version))
        self.database.write(lambda c: self._ask(c, session_id))
        key = f"{safe_name(model_id)}/saved-1"
        with self.store.writing(key) as scratch:
            (scratch / "adapter_model.safetensors").write_bytes(b"w" * 10_000)
        os.utime(self.config.checkpoints_dir / key, (now, now))
        saved = Checkpoint(
            path=TinkerPath(model_id, "weights", "saved"),
            tenant="t",
            store_key=key,
            weights=None,
            base_model="tiny",
            lora=lora,
            size_bytes=10_000,
            public=False,
            user_metadata=None,
            created_at=now,
            expires_at=now + TTL_S,
        )
        self.database.write(lambda c: checkpoint_rows.put(c, saved))
        ended = update(sessions).where(sessions.c.id == session_id).values(status="finished")
        self.database.write(lambda c: c.execute(ended))

    def _write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "adapter_model.safetensors").write_bytes(b"w" * 10_000)
        os.utime(directory, (self.clock(), self.clock()))

    def _ask(self, connection: Any, session_id: str) -> None:
        new = dict.fromkeys(rows.RECORD.parameters) | {"kind": "EXTERNAL", "tenant": "t", "session_id": session_id}
        new |= {"digest": b"d" * 16, "body": BODY, "body_format": "json", "status": "pending", "created_at": 0.0}
        ids = [f"{session_id}-{n}" for n in range(SAMPLES)]
        rows.RECORD.execute(connection, [new | {"id": request_id} for request_id in ids])
        settled = [rows.settlement(request_id, RESULT, self.clock()) for request_id in ids]
        rows.SETTLE_SAMPLE.execute(connection, settled)

    async def sweep(self) -> None:
        """The periodic work of the API process and the engine."""
        end_sessions(self.database)
        for adapter in self.files.unused_adapters():
            self.files.unloaded(adapter)
        self.files.delete_files()
        await self.retention.sweep()
        await self.retention.shorten_log()

    def requests(self) -> int:
        return self.database.read(lambda c: c.execute(select(func.count()).select_from(rows.futures)).scalar_one())

    @staticmethod
    def files_under(directory: Path) -> int:
        return sum(path.is_file() for path in directory.rglob("*"))


def file_bytes(database: Database) -> int:
    """The size of SQLite's file without the log, which has its own bound."""
    assert database.file is not None
    assert database.empty_log()
    return database.file.stat().st_size


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.fixture
async def server(tmp_path: Path, migrated_url: str, clock: Clock) -> AsyncIterator[Server]:
    server = Server(load_config({"state_dir": tmp_path, "database_url": migrated_url}), clock)
    yield server
    await server.writer.close()
    server.database.close()


@ON_SQLITE
async def test_a_week_keeps_the_database_and_the_directories_small(server: Server, clock: Clock) -> None:
    day_one = 0
    for number in range(7 * DAY):
        server.run_session(f"s{number}")
        assert server.requests() <= SAMPLES
        for _ in range(2):
            clock.now += EVERY_S / 2
            await server.sweep()
        assert server.files_under(server.config.adapters_dir) == 0
        assert len(list(server.store.stored())) <= TTL_S / EVERY_S
        if number == DAY - 1:
            day_one = file_bytes(server.database)
    assert file_bytes(server.database) <= day_one + 6 * DAY * KEPT_BYTES
    clock.now += TTL_S
    await server.sweep()
    assert server.requests() == 0
    assert server.files_under(server.config.adapters_dir) == server.files_under(server.config.checkpoints_dir) == 0


PASSES, ROUND_S = 3, 12 * HOUR_S
"""Forward passes per round of the model, and the length of a round."""


@ON_SQLITE
async def test_a_model_that_only_runs_forward_passes_for_a_week_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher or a reference model, which never steps and never ends, with the real engine, loop and backend."""
    clock, ahead = Clock(), 0.0
    monotonic = time.monotonic
    async with harness_in(tmp_path / "state", snapshot_interval_s=30.0) as harness:
        await harness.start()
        teacher = await Trainer.create(harness)
        await teacher.step(1)
        retention = Retention(harness.database, harness.writer, harness.config.result_retention_s)
        count = select(func.count()).select_from(rows.futures)
        small, forward_input = 0, {"data": data(0, 100), "loss_fn": "cross_entropy"}
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: monotonic() + ahead)
            patched.setattr(time, "time", clock)
            for _ in range(14):
                for request_id in [
                    await teacher.send(Kind.FORWARD, forward_input=forward_input) for _ in range(PASSES)
                ]:
                    await teacher.result(request_id)
                await asleep(harness.parts.signals)  # the commands are recorded with the time of now
                ahead += ROUND_S
                clock.now += ROUND_S
                harness.engine.ring()
                await until(lambda: harness.model_row(teacher.model_id).next_seq == teacher.seq_id + 1)
                await asleep(harness.parts.signals)  # it deletes the old snapshot, and reads no more
                await retention.sweep()
                await retention.shorten_log()
                assert harness.database.read(lambda c: c.execute(count).scalar_one()) <= 2 * PASSES, (
                    "the commands of the last day are kept"
                )
                small = small or file_bytes(harness.database)
        files = [path.name for path in harness.snapshots.path(teacher.model_id, 0).parent.iterdir()]
        assert files == [str(teacher.seq_id + 1)]
        assert file_bytes(harness.database) <= 1.5 * small
        before = await teacher.result(await teacher.send(Kind.FORWARD, forward_input=forward_input))
        await harness.stop()
        await harness.start()
        assert await teacher.result(await teacher.send(Kind.FORWARD, forward_input=forward_input)) == before
