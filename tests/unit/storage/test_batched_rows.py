"""Rows that are read by id in batches: what shares a query, and what an error or a caller that goes away does."""

from __future__ import annotations

import asyncio

import pytest

from skyrl.storage.db.database import MAX_NAMED
from skyrl.storage.db.row_caches import BatchedRows


class Table:
    """Rows whose text is their id, except for ids that begin with "no". A query waits until the test lets it go on."""

    def __init__(self) -> None:
        self.queries: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.fails = False
        self.rows = BatchedRows(self._read)

    async def _read(self, ids: list[str]) -> dict[str, str]:
        self.queries.append(ids)
        await self.may_answer.wait()
        if self.fails:
            raise OSError("away")
        return {each: each for each in ids if not each.startswith("no")}

    async def begun(self, queries: int) -> None:
        async with asyncio.timeout(10):
            while len(self.queries) < queries:  # noqa: ASYNC110 - the event of the test is for the answers
                await asyncio.sleep(0)


async def test_ids_that_are_asked_for_while_a_query_runs_share_the_next() -> None:
    table = Table()
    first = asyncio.create_task(table.rows.get("a"))
    await table.begun(1)
    later = [asyncio.create_task(table.rows.get(each)) for each in ("b", "c", "b", "no", "a")]
    await asyncio.sleep(0)
    assert table.queries == [["a"]], "one query at a time"
    table.may_answer.set()
    assert await first == "a"
    assert await asyncio.gather(*later) == ["b", "c", "b", None, "a"]
    assert table.queries == [["a"], ["b", "c", "no", "a"]], "a row that changed since the first query is read again"


async def test_an_error_is_raised_for_all_that_waited_and_for_no_other() -> None:
    table = Table()
    table.fails = True
    table.may_answer.set()
    failed = await asyncio.gather(table.rows.get("a"), table.rows.get("b"), return_exceptions=True)
    assert [type(each) for each in failed] == [OSError, OSError]
    table.fails = False
    assert await table.rows.get("a") == "a"


async def test_a_caller_that_goes_away_takes_no_row_from_others() -> None:
    table = Table()
    leaves, stays = (asyncio.create_task(table.rows.get(each)) for each in ("a", "b"))
    await table.begun(1)
    leaves.cancel()
    await asyncio.wait([leaves])
    table.may_answer.set()
    assert await stays == "b"
    with pytest.raises(asyncio.CancelledError):
        leaves.result()


async def test_a_query_names_a_bounded_number_of_ids() -> None:
    table = Table()
    table.may_answer.set()
    ids = [f"row-{number}" for number in range(2 * MAX_NAMED + 10)]
    assert await asyncio.gather(*map(table.rows.get, ids)) == ids
    assert max(map(len, table.queries)) == MAX_NAMED
    assert len(table.queries) == 3
