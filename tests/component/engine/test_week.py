"""A week of load with a clock that runs ahead: the database and the directories of adapters and checkpoints stay small.

The test calls the steps of the server's processes in their order, so rows and files are the real ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Trainer, asleep, data, harness_in, until
from sqlalchemy import func, insert, select, update

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.paths import TinkerPath
from skyrl.engine.sweeping import FileSweeper
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db import checkpoints as checkpoint_rows
from skyrl.storage.db import futures as rows
from skyrl.storage.db.checkpoints import Checkpoint
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.samplers import Sampler, add_sampler
from skyrl.storage.db.session_ends import end_sessions
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_SQLITE

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
        for adapter in self.files.unused_adapters(set()):
            self.files.unloaded(adapter)
        self.files.delete_files(set())
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
