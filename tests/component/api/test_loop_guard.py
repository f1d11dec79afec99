"""The guard of the component tests: which calls it records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blocking import SKYRL_DIRECTORY, noted_waits

from skyrl.storage.db.database import Database

SOURCE = """
import asyncio

async def reads(database):
    return ask(database)

async def reads_on_a_thread(database):
    return await asyncio.to_thread(ask, database)

def ask(database):
    return database.read(lambda connection: 1)

async def sleeps(clock):
    clock.sleep(0)
"""
"""Compiled as if the source were a module of skyrl."""


@pytest.fixture
def no_loop_waits() -> None:
    """Replaces the automatic fixture, because here the guard must find calls."""


@pytest.fixture
def recorded_waits() -> Iterator[list[str]]:
    with noted_waits() as found:
        yield found


@pytest.fixture
def skyrl_code() -> Any:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, f"{SKYRL_DIRECTORY}/made_up.py", "exec"), names)
    return SimpleNamespace(**names)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'some.db'}")
    yield database
    database.close()


async def test_a_waiting_coroutine_of_skyrl_is_recorded_with_its_place(
    recorded_waits: list[str], skyrl_code: Any, database: Database
) -> None:
    assert await skyrl_code.reads(database) == 1
    await skyrl_code.sleeps(time)
    assert ["Database.read" in recorded_waits[0], "time.sleep" in recorded_waits[1]] == [True, True]
    assert "made_up.py" in recorded_waits[0]
    assert len(recorded_waits) == 2


async def test_waits_on_worker_threads_and_waits_of_tests_are_not_recorded(
    recorded_waits: list[str], skyrl_code: Any, database: Database
) -> None:
    assert await skyrl_code.reads_on_a_thread(database) == 1
    assert database.read(lambda _: 2) == 2
    assert skyrl_code.ask(database) == 1
    assert recorded_waits == []
