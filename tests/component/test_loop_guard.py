"""The guard of the component tests itself: which calls it notes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blocking import SKYRL_DIRECTORY, noted_waits

from skyrl.db.database import Database

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

async def waits_for(future):
    return future.result()
"""
"""As if a module of skyrl had it."""


@pytest.fixture
def no_loop_waits() -> None:
    """Here the guard is to find something."""


@pytest.fixture
def noted() -> Iterator[list[str]]:
    with noted_waits() as found:
        yield found


@pytest.fixture
def ours() -> Any:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, f"{SKYRL_DIRECTORY}/made_up.py", "exec"), names)
    return SimpleNamespace(**names)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'some.db'}")
    yield database
    database.close()


async def test_a_coroutine_of_ours_that_waits_is_noted_with_its_place(
    noted: list[str], ours: Any, database: Database
) -> None:
    assert await ours.reads(database) == 1
    await ours.sleeps(time)
    assert ["Database.read" in noted[0], "time.sleep" in noted[1]] == [True, True]
    assert "made_up.py" in noted[0]
    assert len(noted) == 2


async def test_a_callback_of_ours_that_waits_is_noted(noted: list[str], ours: Any, database: Database) -> None:
    asyncio.get_running_loop().call_soon(ours.ask, database)
    await asyncio.sleep(0)
    assert len(noted) == 1


async def test_what_waits_on_a_thread_or_is_a_tests_own_is_not_noted(
    noted: list[str], ours: Any, database: Database
) -> None:
    assert await ours.reads_on_a_thread(database) == 1
    assert database.read(lambda _: 2) == 2
    assert ours.ask(database) == 1
    assert noted == []


async def test_a_future_is_waited_for_only_while_it_has_no_result(noted: list[str], ours: Any) -> None:
    done: Future[int] = Future()
    done.set_result(7)
    assert await ours.waits_for(done) == 7
    assert noted == []
    pending: Future[int] = Future()

    def end_when_noted() -> None:
        deadline = time.monotonic() + 60
        while not noted and time.monotonic() < deadline:
            time.sleep(0.005)
        pending.set_result(8)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(end_when_noted)
        assert await ours.waits_for(pending) == 8
    assert ["Future.result" in each for each in noted] == [True]
