"""The group-commit thread survives an error that only SQLite's driver can cause."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from things import ROW, ids, things

from skyrl.storage.db.database import Database
from skyrl.storage.db.writer import GroupCommitWriter


async def test_the_writer_goes_on_with_a_new_connection_after_a_rollback_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(f"sqlite:///{tmp_path / 'w.db'}")
    database.write(lambda c: things.create(c))
    writer = GroupCommitWriter(database)
    await writer.execute(ROW, {"id": 1, "name": "x"})
    real_driver = writer._thread_rows._driver
    assert real_driver is not None

    class BrokenDriver:
        in_transaction = True

        def execute(self, sql: str) -> None:
            real_driver.execute(sql)

        def executemany(self, sql: str, rows: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        def rollback(self) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        def close(self) -> None:
            real_driver.close()

    monkeypatch.setattr(writer._thread_rows, "_driver", BrokenDriver())
    writer._loop_rests_until = float("inf")
    with pytest.raises(OperationalError, match="disk I/O error"):
        await writer.execute(ROW, {"id": 2, "name": "x"})
    async with asyncio.timeout(60):
        await writer.execute(ROW, {"id": 3, "name": "x"})
    await writer.close()
    assert ids(database) == [1, 3]
    database.close()
