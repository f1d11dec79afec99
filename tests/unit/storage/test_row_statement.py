"""Rows of a group in few SQLite statements: all are stored, and their ends differ."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl.storage.db.agents import _ADD
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import RECORD, SETTLE, SETTLE_SAMPLE, Outcome, futures, settlement
from skyrl.storage.db.models import _TOUCH
from skyrl.storage.db.row_statements import ROW_BYTES, SIZES, RowStatement
from skyrl.storage.db.sessions import _BEAT
from skyrl.storage.db.tables import FutureRow
from skyrl.storage.db.writer import GroupCommitWriter

COLUMNS = [column.key for column in futures.columns]
COUNTS = [1, 2, 3, 5, 64, 70, 200, 257, 600]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'rows.db'}")
    FutureRow.metadata.create_all(database.writer)
    yield database
    database.close()


@pytest.fixture
def driver(database: Database) -> Iterator[sqlite3.Connection]:
    connection = database.connect_driver()
    assert isinstance(connection, sqlite3.Connection)
    yield connection
    connection.close()


def recorded(number: int) -> dict[str, Any]:
    """The parameters of a row; each third row has no number, and each second one is traced."""
    return {
        "id": f"r{number}",
        "kind": "external",
        "tenant": f"tenant {number % 3}",
        "session_id": "s",
        "model_id": None,
        "seq_id": None,
        "sampling_session_id": "s:sample:0",
        "sample_seq_id": None if number % 3 == 0 else number,
        "digest": bytes([number % 256]) * 16,
        "body": b"\0body %d" % number,
        "body_format": "json",
        "status": "pending",
        "created_at": 1e9 + number / 7,
        "owner": "api-0",
        "not_before": None,
        "trace": None if number % 2 else "00-trace",
    }


def settled(number: int, now: float) -> dict[str, Any]:
    outcome = Outcome(b"\0result %d" % number, "proto:sample")
    if number % 5 == 0:
        outcome = Outcome(error=f"Fehler \u00fc {number}", error_category="user")
    return settlement(f"r{number}", outcome, now)


def run(driver: sqlite3.Connection, statement: RowStatement, rows: Sequence[dict[str, Any]]) -> int:
    return sum(driver.execute(*call).rowcount for call in statement.calls(rows))


def stored(driver: sqlite3.Connection, columns: Sequence[str] = COLUMNS) -> list[tuple[Any, ...]]:
    return driver.execute(f"SELECT {', '.join(columns)} FROM futures ORDER BY n").fetchall()


@pytest.mark.parametrize("count", COUNTS)
def test_rows_are_stored_and_end_as_they_were_given(driver: sqlite3.Connection, count: int) -> None:
    rows = [recorded(number) for number in range(count)]
    assert run(driver, RECORD, rows) == count
    assert stored(driver, RECORD.parameters) == [tuple(row.values()) for row in rows]
    ends = [settled(number, 2e9) for number in range(count)]
    assert run(driver, SETTLE_SAMPLE, ends) == count
    columns = ("status", "result", "result_format", "error", "error_category")
    assert stored(driver, columns) == [tuple(end[f"new_{name}"] for name in columns) for end in ends]
    assert stored(driver, ["body"]) == [(None,)] * count


@pytest.mark.parametrize("latest", [None, 2.5e9])
def test_ends_of_one_group_differ_and_come_after_all_earlier_ones(
    driver: sqlite3.Connection, latest: float | None
) -> None:
    """The clock goes back with each row. `latest`: a stored end of another process whose clock is ahead."""
    count = 600
    run(driver, RECORD, [recorded(number) for number in range(count + 1)])
    if latest is not None:
        driver.execute("UPDATE futures SET status = 'done', completed_at = ? WHERE id = ?", (latest, f"r{count}"))
    clock = [2e9 - 2e-6 * number for number in range(count)]
    run(driver, SETTLE_SAMPLE, [settled(number, now) for number, now in enumerate(clock)])
    ends = driver.execute(
        "SELECT round(completed_at * 1e6), id FROM futures WHERE completed_at != ? ORDER BY completed_at",
        (latest or 0,),
    ).fetchall()
    assert [request_id for _, request_id in ends] == [f"r{number}" for number in reversed(range(count))]
    assert len({cursor for cursor, _ in ends}) == count
    assert ends[0][0] >= 1e6 * (latest or clock[-1])


def traced(driver: sqlite3.Connection, statement: RowStatement, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The statements that ran, with their values in them."""
    ran: list[str] = []
    driver.set_trace_callback(ran.append)
    try:
        assert run(driver, statement, rows) == len(rows)
    finally:
        driver.set_trace_callback(None)
    return [text for text in ran if text.startswith(("INSERT", "UPDATE"))]


def test_large_rows_run_one_by_one(driver: sqlite3.Connection) -> None:
    """In a statement of many rows SQLite would hold all their values twice, and keep them."""
    rows = [recorded(number) for number in range(40)]
    for row in rows[::4]:
        row["body"] = bytes(ROW_BYTES + 1)
    assert len(traced(driver, RECORD, rows)) == 10 + 1
    ends = [settled(number, 2e9 + number) for number in range(40)]
    for end in ends[1::4]:
        end["new_result"] = bytes(ROW_BYTES + 1)
    assert len(traced(driver, SETTLE_SAMPLE, ends)) == 10 + 1
    cursors = driver.execute("SELECT DISTINCT round(completed_at * 1e6) FROM futures").fetchall()
    assert len(cursors) == 40
    sizes = dict(driver.execute("SELECT id, length(result) FROM futures WHERE result IS NOT NULL").fetchall())
    assert sizes == {end["request_id"]: len(end["new_result"]) for end in ends if end["new_result"] is not None}


def test_what_a_client_or_vllm_sends_counts_as_bytes_of_its_row() -> None:
    """All other values are ids, names and numbers, which the server makes or bounds."""
    assert RECORD.bytes_of(recorded(1) | {"body": bytes(3000)}) == 3000
    assert SETTLE_SAMPLE.bytes_of(settlement("r", Outcome(bytes(700), "proto:sample"), 2e9)) == 700
    assert SETTLE_SAMPLE.bytes_of(settlement("r", Outcome(error="x" * 500, error_category="user"), 2e9)) == 500


@pytest.mark.parametrize("clock", [1e9, 3e9])
def test_the_first_outcome_stays_if_a_group_has_two_of_one_request(driver: sqlite3.Connection, clock: float) -> None:
    run(driver, RECORD, [recorded(number) for number in (1, 2)])
    ends = [settled(1, 2e9), settled(2, 2e9), settled(1, clock)]
    ends[2]["new_result"] = b"another"
    assert run(driver, SETTLE_SAMPLE, ends) == 2
    assert stored(driver, ["result"]) == [(b"\0result 1",), (b"\0result 2",)]


def test_rows_that_ended_before_stay_as_they_are(driver: sqlite3.Connection) -> None:
    run(driver, RECORD, [recorded(number) for number in range(8)])
    run(driver, SETTLE_SAMPLE, [settled(3, 2e9)])
    before = stored(driver)[3]
    assert run(driver, SETTLE_SAMPLE, [settled(number, time.time()) for number in range(1, 8)]) == 6
    assert stored(driver)[3] == before
    assert stored(driver, ["status"])[0] == ("pending",)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("statement", "table", "by_id"),
    [
        (SETTLE, "futures", "INDEX sqlite_autoindex_futures_3"),
        (SETTLE_SAMPLE, "futures", "INDEX sqlite_autoindex_futures_3"),
        (_BEAT, "sessions", "INDEX sqlite_autoindex_sessions_1"),
        (_TOUCH, "models", "COVERING INDEX sqlite_autoindex_models_1"),
        (_ADD, "s", "INDEX sqlite_autoindex_agent_sessions_1"),
    ],
    ids=["settle", "settle_sample", "beat", "touch", "add"],
)
def test_each_given_row_is_looked_for_by_its_id(
    driver: sqlite3.Connection, statement: RowStatement, table: str, by_id: str, size: int
) -> None:
    """Also when the statistics say that few rows have each status."""
    driver.execute("ANALYZE")
    for index in ("ix_futures_status_n", "ix_sessions_status", "ix_sessions_active_tenant"):
        driver.execute("INSERT INTO sqlite_stat1 VALUES (?, ?, '2000 1 1')", (index.split("_")[1], index))
    driver.execute("ANALYZE sqlite_schema")  # reads the statistics again
    nothing = [None] * (size * len(statement.parameters))
    plan = driver.execute(f"EXPLAIN QUERY PLAN {statement.sqlite_for(size)}", nothing).fetchall()
    steps = [step[-1] for step in plan]
    assert f"SEARCH {table} USING {by_id} (id=?)" in steps, steps
    assert not any(step.startswith(f"SCAN {table}") or "status" in step for step in steps), steps


def test_few_places_of_a_statement_stay_empty() -> None:
    for count in range(1, 1000):
        taken = [len(values) // len(RECORD.parameters) for _, values in RECORD.calls([recorded(1)] * count)]
        assert set(taken) <= set(SIZES)
        assert count <= sum(taken) <= count / 0.75
        assert len(taken) <= count // max(SIZES) + 8


def test_rows_are_written_in_the_order_of_their_unique_key() -> None:
    """Two processes that write the same samples at once would wait for each other otherwise."""
    rows = [recorded(number) for number in (5, 2, 4, 1)]
    ordered = RECORD.in_order(rows)
    assert RECORD.in_order(rows[::-1]) == ordered
    assert [row["sample_seq_id"] for row in ordered if row["sample_seq_id"] is not None] == sorted(
        row["sample_seq_id"] for row in rows if row["sample_seq_id"] is not None
    )


async def test_a_write_tells_whether_it_has_changed_its_row(database: Database) -> None:
    writer = GroupCommitWriter(database)
    assert await writer.execute(RECORD, recorded(1)) is True
    assert await writer.execute(SETTLE_SAMPLE, settled(1, 2e9)) is True
    assert await writer.execute(SETTLE_SAMPLE, settled(1, 2e9)) is False
    await writer.close()
