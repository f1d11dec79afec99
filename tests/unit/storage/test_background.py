"""A repeated action goes on after every error. While the database is away it logs one line without a traceback."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator

import pytest
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError

from skyrl.storage.db.repeats import repeat


def database_is_locked() -> Exception:
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY  # type: ignore[misc]
    error = DBAPIError.instance("SELECT secrets", None, locked, sqlite3.Error, dialect=sqlite.dialect())
    assert isinstance(error, Exception)
    return error


async def logged(rounds: list[Exception | None], caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, bool]]:
    """Run one round per entry, which the round raises; returns level, text and "has a traceback" of each log record."""
    ended = asyncio.Event()
    remaining: Iterator[Exception | None] = iter(rounds)

    async def action() -> None:
        try:
            error = next(remaining)
        except StopIteration:
            ended.set()
            return
        if error is not None:
            raise error

    with caplog.at_level(logging.INFO, logger="skyrl.storage.db.repeats"):
        task = asyncio.create_task(repeat("counting", 0.0, action))
        await ended.wait()
        task.cancel()
    return [(record.levelname, record.getMessage(), record.exc_info is not None) for record in caplog.records]


async def test_the_log_says_once_that_the_database_is_away_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = await logged(
        [
            None,
            database_is_locked(),
            database_is_locked(),
            database_is_locked(),
            None,
            None,
            database_is_locked(),
            None,
        ],
        caplog,
    )
    away = ("ERROR", "counting: the database cannot be used, tried every 0 s: database is locked", False)
    back = ("INFO", "counting: the database can be used again", False)
    assert records == [away, back, away, back]


async def test_every_other_error_is_logged_with_its_traceback_each_time(caplog: pytest.LogCaptureFixture) -> None:
    records = await logged(
        [ValueError("a bug"), database_is_locked(), ValueError("a bug"), database_is_locked(), None], caplog
    )
    assert [(level, traceback) for level, _, traceback in records] == [
        ("ERROR", True),
        ("ERROR", False),
        ("ERROR", True),
        ("INFO", False),
    ]


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_with_a_ring_ends_the_rounds(turns: int) -> None:
    """`turns` of the event loop lie between the ring and the cancellation."""
    rung = asyncio.Event()

    async def action() -> None: ...

    task = asyncio.create_task(repeat("counting", 60.0, action, rung=rung))
    await asyncio.sleep(0.01)
    rung.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    ended, _ = await asyncio.wait({task}, timeout=1)
    task.cancel()
    assert ended
