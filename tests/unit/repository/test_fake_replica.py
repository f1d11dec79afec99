"""The fake replica of the checks of the simulation: its places, the order of waiting samples, and its adapter slots."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.connection import Connection
from benchmarks.null_upstream import Requests
from benchmarks.simulation.fake_replica import Replica


async def _run(settings: str, samples: list[tuple[str, int]]) -> tuple[list[int], dict[str, int]]:
    """Sends samples of an adapter with a priority, one every 10 ms. Returns the priorities in the order of the answers,
    and the counts."""
    replica = Replica()
    server = await asyncio.get_running_loop().create_server(lambda: Requests(replica), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ended: list[int] = []

    async def sample(adapter: str, priority: int) -> None:
        connection = Connection("127.0.0.1", port, b"")
        body = json.dumps({"model": adapter, "prompt": [3], "max_tokens": 1, "priority": priority}).encode()
        status, _ = await connection.post(b"/v1/completions", body)
        assert status == 200
        ended.append(priority)
        connection.close()

    async with server:
        control = Connection("127.0.0.1", port, b"")
        await control.post(f"/control?delay_ms=100&{settings}".encode(), b"")
        async with asyncio.TaskGroup() as tasks:
            for adapter, priority in samples:
                tasks.create_task(sample(adapter, priority))
                await asyncio.sleep(0.01)
        _, counts = await control.post(b"/control", b"")
        control.close()
    return ended, json.loads(counts)


@pytest.mark.parametrize(("fair", "order"), [(1, [5, 1, 9]), (0, [5, 9, 1])])
async def test_the_lowest_priority_is_next_or_the_sample_that_came_first(fair: int, order: list[int]) -> None:
    ended, counts = await _run(f"places=1&fair={fair}", [("a", 5), ("a", 9), ("a", 1)])
    assert ended == order
    assert (counts["requests"], counts["loads"], counts["evictions"]) == (3, 1, 0)


async def test_an_adapter_that_left_for_another_one_is_loaded_again() -> None:
    ended, counts = await _run("slots=1", [("a", 1), ("a", 2), ("b", 3), ("a", 4)])
    assert ended == [1, 2, 3, 4], "as many places as samples"
    assert (counts["loads"], counts["evictions"]) == (3, 2)
