"""Data that must survive a loss of power is synced to the disk before any client hears of it. No test cuts the power:
the tests record the sync calls and their order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Trainer, harness_in, until

from skyrl.base.types.requests import Kind
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.db.database import Database

AFTER_EVERY_STEP_S = 0.000_001
COMMIT = "a synced commit"
FULL, NORMAL = 2, 1
"""SQLite's values of PRAGMA synchronous. With FULL a commit syncs the log, with everything in it."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of synced files and directories, and synced commits, in order."""
    noted: list[str] = []
    sync, write = os.fsync, Database.write

    def noting_sync(descriptor: int) -> None:
        sync(descriptor)
        noted.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def noting_write(database: Database, change: Any, *, power_safe: bool = False) -> Any:
        done = write(database, change, power_safe=power_safe)
        if power_safe:
            noted.append(COMMIT)
        return done

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Database, "write", noting_write)
    return noted


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux: reads names of open files in /proc")
async def test_saves_and_snapshots_are_synced_before_their_commit(tmp_path: Path, events: list[str]) -> None:
    async with harness_in(tmp_path / "state", snapshot_interval_s=AFTER_EVERY_STEP_S) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        assert events == [], "results that recovery can compute again are not synced"
        await trainer.step(2)
        await trainer.do(Kind.SAVE_WEIGHTS, path="a")  # this save comes after the snapshot of the second step
        snapshot, save = events[: events.index(COMMIT)], events[events.index(COMMIT) + 1 :]
        for written in (snapshot, save):
            assert [name for name in written if name.endswith(".safetensors")]
            assert written[0] != COMMIT
        assert save[-1] == COMMIT


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux: reads names of open files in /proc")
async def test_an_unnamed_save_is_synced_after_its_commit(tmp_path: Path, events: list[str]) -> None:
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        events.clear()
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        await until(lambda: "skyrl.db-wal" in events)
        assert COMMIT not in events
        assert sorted(events[:2]) == ["adapter_config.json", "adapter_model.safetensors"]
        assert events[2:] == ["v000001", safe_name(trainer.model_id), "skyrl.db-wal"], "the row comes last"


def test_a_power_safe_commit_syncs_the_log(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'skyrl.db'}")

    def synchronous(**options: Any) -> int:
        return database.write(lambda c: c.exec_driver_sql("PRAGMA synchronous").scalar_one(), **options)

    assert (synchronous(power_safe=True), synchronous()) == (FULL, NORMAL)
    database.close()
