"""What repeats goes on whatever happens, and says of the database's absence no more than that."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator

import pytest
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError

from skyrl.db.periodic import repeat


def away() -> Exception:
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY  # type: ignore[misc]
    error = DBAPIError.instance("SELECT secrets", None, locked, sqlite3.Error, dialect=sqlite.dialect())
    assert isinstance(error, Exception)
    return error


async def logged(rounds: list[Exception | None], caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, bool]]:
    """Level, text and whether there is a traceback, of what these rounds say."""
    ended = asyncio.Event()
    left: Iterator[Exception | None] = iter(rounds)

    async def action() -> None:
        try:
            error = next(left)
        except StopIteration:
            ended.set()
            return
        if error is not None:
            raise error

    with caplog.at_level(logging.INFO, logger="skyrl.db.periodic"):
        task = asyncio.create_task(repeat("counting", 0.0, action))
        await ended.wait()
        task.cancel()
    return [(record.levelname, record.getMessage(), record.exc_info is not None) for record in caplog.records]


async def test_a_database_that_is_away_is_told_once_and_once_that_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    said = await logged([None, away(), away(), away(), None, None, away(), None], caplog)
    gone = ("ERROR", "counting: the database cannot be used, tried every 0 s: database is locked", False)
    back = ("INFO", "counting: the database can be used again", False)
    assert said == [gone, back, gone, back]


async def test_a_fault_of_ours_is_told_with_its_place_every_time(caplog: pytest.LogCaptureFixture) -> None:
    said = await logged([ValueError("mine"), away(), ValueError("mine"), away(), None], caplog)
    assert [(level, traceback) for level, _, traceback in said] == [
        ("ERROR", True),
        ("ERROR", False),
        ("ERROR", True),
        ("INFO", False),
    ]
