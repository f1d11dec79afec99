"""Notices between processes, over a real PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from engine_harness import until

from skyrl.storage.db.database import postgres_conninfo
from skyrl.storage.notices import MAX_PAYLOAD, PostgresNotify
from tests.postgres_server import ON_POSTGRES, PostgresServer

pytestmark = ON_POSTGRES


class Process:
    def __init__(self, url: str, name: str) -> None:
        self.received: list[str] = []
        self.notices = PostgresNotify(postgres_conninfo(url), name, self.received.extend)
        self.running = asyncio.create_task(self.notices.run())

    async def stop(self) -> None:
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running


@pytest.fixture
async def two(migrated_url: str) -> AsyncIterator[tuple[Process, Process]]:
    first, second = Process(migrated_url, "first/0"), Process(migrated_url, "second/0")
    await wait_until_connected(first, second)
    yield first, second
    await first.stop()
    await second.stop()


async def wait_until_connected(first: Process, second: Process) -> None:
    """Wait until each process receives the other's notices."""

    def is_connected(sender: Process, receiver: Process) -> bool:
        sender.notices.send(["are you there"])
        return "are you there" in receiver.received

    for pair in ((first, second), (second, first)):
        pair[1].received.clear()
        await until(lambda pair=pair: is_connected(*pair))
    for process in (first, second):
        process.notices.send(["go"])
    await until(lambda: "go" in first.received and "go" in second.received)
    first.received.clear()
    second.received.clear()


async def test_a_notice_reaches_the_other_process_only(two: tuple[Process, Process]) -> None:
    first, second = two
    words = [f"{number:036x}" for number in range(1_000)]
    assert sum(map(len, words)) > 2 * MAX_PAYLOAD
    first.notices.send(words)
    await until(lambda: len(second.received) == len(words))
    assert second.received == words
    assert first.received == []


async def test_notices_arrive_again_after_the_connections_broke(
    two: tuple[Process, Process], postgres: PostgresServer
) -> None:
    notify_queries = "query LIKE 'LISTEN%' OR query LIKE 'SELECT pg_notify%'"
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {notify_queries}")
    await wait_until_connected(*two)
    two[0].notices.send(["word"])
    await until(lambda: two[1].received == ["word"])
