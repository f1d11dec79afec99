"""The file sweeper keeps the files of running saves and of adapters that are used again, and deletes unused ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.paths import TinkerPath
from skyrl.engine import sweeping
from skyrl.engine.sweeping import FileSweeper
from skyrl.storage.checkpoint_store.base import StoredKey, StoreError
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db.checkpoints import Checkpoint, count_stored, put
from skyrl.storage.db.database import MAX_NAMED, Connection, Database
from skyrl.storage.db.models import Model, add_model, set_status
from skyrl.storage.db.samplers import Sampler, add_sampler
from skyrl.storage.db.tables import SessionRow
from tests.databases import make_tables

MODEL = "s1:train:0"
ADAPTER = AdapterVersion.of(MODEL, 1)
LONG_AGO = time.time() - 3600


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return load_config({"state_dir": tmp_path})


@pytest.fixture
def database(config: ServerConfig) -> Iterator[Database]:
    database = Database(config.database)
    make_tables(database)
    yield database
    database.close()


@pytest.fixture
def saving() -> set[str]:
    """The models with a running save."""
    return set()


@pytest.fixture
def sweeper(config: ServerConfig, database: Database, saving: set[str]) -> FileSweeper:
    return FileSweeper(config, database, open_store(config), saving=lambda: saving)


def write_old_adapter(config: ServerConfig) -> Path:
    """Write an adapter version with an old modification time. No row names it."""
    directory = version_directory(config.state_dir, ADAPTER)
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    os.utime(directory, (LONG_AGO, LONG_AGO))
    return directory


def store_old_checkpoint(config: ServerConfig) -> Path:
    """Store a checkpoint without a row, with an old modification time."""
    key = f"{safe_name(MODEL)}/saved-1"
    with open_store(config).writing(key) as scratch:
        (scratch / "adapter_model.safetensors").write_bytes(b"weights")
    os.utime(config.checkpoints_dir / key, (LONG_AGO, LONG_AGO))
    return config.checkpoints_dir / key


def test_files_of_a_running_save_are_kept_however_long_it_takes(
    config: ServerConfig, sweeper: FileSweeper, saving: set[str]
) -> None:
    write_old_adapter(config)
    stored = store_old_checkpoint(config)
    saving.add(MODEL)
    assert sweeper.unused_adapters() == []
    sweeper.delete_files()
    assert stored.is_dir()
    saving.clear()
    assert sweeper.unused_adapters() == [ADAPTER]
    sweeper.delete_files()
    assert not stored.exists()


def test_an_unloaded_adapter_that_a_repeated_save_uses_again_is_kept(
    config: ServerConfig, database: Database, sweeper: FileSweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    directory = write_old_adapter(config)
    sweeper.unloaded(ADAPTER)
    sessions = SessionRow.__table__  # type: ignore[attr-defined]
    session = {"id": "s1", "tenant": "t", "status": "active", "created_at": 0.0, "heartbeat_at": 0.0}
    database.write(lambda c: c.execute(sessions.insert(), session | {"sdk_version": "", "tags": []}))
    sampler = Sampler("s1:sample:0", "s1", "t", "base", None, ADAPTER)
    database.write(lambda c: add_sampler(c, sampler, 0))
    sweeper.delete_files()
    assert directory.is_dir()


def test_an_unloaded_adapter_is_deleted_after_the_grace_time(
    config: ServerConfig, sweeper: FileSweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_old_adapter(config)
    sweeper.unloaded(ADAPTER)
    sweeper.delete_files()
    assert directory.is_dir()
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    sweeper.unloaded(ADAPTER)
    sweeper.delete_files()
    assert not directory.exists()


def test_directories_of_models_without_files_are_deleted(
    config: ServerConfig, sweeper: FileSweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that an earlier version has left. Each sweep walks them all."""
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    groups = [write_old_adapter(config).parent, store_old_checkpoint(config).parent]
    for root in (config.full_weights_dir, config.snapshots_dir):
        groups.append(root / safe_name(MODEL))
        groups[-1].mkdir(parents=True)
    used = version_directory(config.state_dir, AdapterVersion.of("s2:train:0", 1))
    used.mkdir(parents=True)
    sweeper.unloaded(ADAPTER)
    for _ in range(2):  # files, directories
        sweeper.delete_files()
    assert [group for group in groups if group.exists()] == []
    assert used.is_dir()


@pytest.mark.parametrize(
    ("model_status", "session_status", "stays"),
    [
        ("ready", "active", True),
        ("closed", "finished", False),
        ("failed", "active", True),
        ("failed", "finished", False),
        ("failed", "expired", False),
    ],
)
def test_snapshots_of_closed_models_and_of_failed_ones_without_a_session_are_deleted(
    config: ServerConfig, database: Database, sweeper: FileSweeper, model_status: str, session_status: str, stays: bool
) -> None:
    sessions = SessionRow.__table__  # type: ignore[attr-defined]
    session = {"id": "s1", "tenant": "t", "status": session_status, "created_at": 0.0, "heartbeat_at": 0.0}
    database.write(lambda c: c.execute(sessions.insert(), session | {"sdk_version": "", "tags": []}))
    database.write(add_model(Model(MODEL, "s1", "t", "base", LoraSpec(4, 8.0, 1), None), 0))
    database.write(set_status(MODEL, model_status))
    snapshot = config.snapshots_dir / safe_name(MODEL) / "3"
    snapshot.mkdir(parents=True)
    sweeper.delete_files()
    assert snapshot.is_dir() == stays


def test_a_sweep_deletes_a_bounded_number_of_expired_checkpoints(database: Database, sweeper: FileSweeper) -> None:
    """PostgreSQL takes at most 65,535 parameters in a statement, and other writers wait for the write lock."""
    lora = LoraSpec(4, 8.0, 1)

    def add(connection: Connection) -> None:
        for number in range(MAX_NAMED + 1):
            path = TinkerPath(MODEL, "weights", str(number))
            put(connection, Checkpoint(path, "t", f"m/{number}-1", None, "base", lora, 1, False, None, 0.0, LONG_AGO))

    database.write(add)
    sweeper.unused_adapters()
    assert database.read(count_stored) == 1
    sweeper.unused_adapters()
    assert database.read(count_stored) == 0


def test_a_store_that_is_away_ends_no_sweep(
    config: ServerConfig, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(config)
    sweeper = FileSweeper(config, database, store)
    key = f"{safe_name(MODEL)}/saved-1"
    with store.writing(key) as scratch:
        (scratch / "adapter_model.safetensors").write_bytes(b"weights")
    os.utime(config.checkpoints_dir / key, (LONG_AGO, LONG_AGO))

    def away() -> Iterator[StoredKey]:
        raise StoreError("no route to the store")

    with monkeypatch.context() as patched:
        patched.setattr(store, "walk", away)
        sweeper.delete_files()
    assert "cannot be listed: no route to the store" in caplog.text
    sweeper.delete_files()
    assert not (config.checkpoints_dir / key).exists()
