"""A catalogue of many versions: lists, searches and sweeps read the rows that they are about, and what is deleted is
deleted in short transactions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, func, insert, select, text, update

from benchmarks import catalogue_rows
from skyrl.api.access import tenant_of_key
from skyrl.base.config.loading import load_config
from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.paths import TinkerPath, parse_path
from skyrl.engine import sweeping
from skyrl.engine.sweeping import FileSweeper
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db import adapter_versions, quotas, retention, runs, session_ends, usage_report
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.checkpoint_search import CheckpointQuery, CheckpointSearch
from skyrl.storage.db.checkpoints import Checkpoints, Seen, checkpoints, put, stored_at
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import Models
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.session_ends import end_sessions
from skyrl.storage.db.session_search import SessionQuery, SessionSearch, Status
from skyrl.storage.db.sessions import Sessions, sessions
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH

VERSIONS = 1_000
TENANT, OTHER = tenant_of_key(catalogue_rows.KEY), tenant_of_key(f"{catalogue_rows.KEY}-1")
PATH = parse_path("tinker://s00000x4:train:0/sampler_weights/step-0007", "path")
LARGE = ("checkpoints", "sampling_sessions", "sessions", "models", "futures", "run_steps", "usage")
Sent = list[tuple[str, Any]]

pytestmark = ON_BOTH


@pytest.fixture
def catalogue(database: Database) -> Database:
    """The database with the rows of VERSIONS versions."""

    def fill(connection: Connection) -> None:
        for rows, _ in catalogue_rows.catalogue(VERSIONS, time.time()):
            catalogue_rows.add(connection, rows)

    database.write(fill)
    if not database.is_sqlite:
        database.write(lambda c: c.execute(text("ANALYZE")))
    return database


@pytest.fixture
def sent(database: Database) -> Iterator[Sent]:
    """The statements that are sent, with their parameters."""
    found: Sent = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        found.append((statement, parameters))

    for engine in {database.reader, database.writer}:
        event.listen(engine, "before_cursor_execute", note)
    yield found
    for engine in {database.reader, database.writer}:
        event.remove(engine, "before_cursor_execute", note)


def plans(database: Database, sent: Sent) -> list[str]:
    """The steps of the plans of these statements. PostgreSQL reads small tables whole in any case, and sorts what is
    little, so it is told not to where there is another way."""
    wanted = [each for each in sent if each[0].startswith(("SELECT", "UPDATE", "DELETE")) and "pg_" not in each[0]]
    assert wanted

    def ask(connection: Connection) -> list[str]:
        if not database.is_sqlite:
            for way in ("seqscan", "sort", "bitmapscan"):
                connection.exec_driver_sql(f"SET LOCAL enable_{way} = off")
        explain = "EXPLAIN QUERY PLAN" if database.is_sqlite else "EXPLAIN"
        return [str(row[-1]) for s, p in wanted for row in connection.exec_driver_sql(f"{explain} {s}", p)]

    return database.read(ask)


def whole_reads(database: Database, sent: Sent) -> list[str]:
    """The steps that read a whole large table."""
    steps = plans(database, sent)
    if database.is_sqlite:
        return [
            step for step in steps if any(f"SCAN {table}" == step or f"SCAN {table} USING" in step for table in LARGE)
        ]
    return [step for step in steps if any(f"Seq Scan on {table} " in step for table in LARGE)]


OF_PUBLISHED, OF_OPEN = "ix_checkpoints_public", "ix_sampling_sessions_open"
"""Partial indexes: to read one whole is to read the published checkpoints, or the open sampling sessions."""


async def test_lists_searches_and_the_page_read_no_large_table_whole(
    catalogue: Database, writer: GroupCommitWriter, sent: Sent
) -> None:
    stored, models, active = Checkpoints(catalogue, writer), Models(catalogue, writer), Sessions(catalogue, writer)
    for seen in (Seen(), Seen(published=True)):
        assert len((await stored.page(TENANT, 20, 0, seen))[0]) == 20
        query = CheckpointQuery(seen, project_ids=("default",))
        assert len((await CheckpointSearch(catalogue).page(TENANT, query, 20))[0]) == 20
        assert len(await stored.of_model(PATH.model_id, TENANT, seen)) == catalogue_rows.EACH
        assert await stored.latest([PATH.model_id], TENANT, seen)
    assert await stored.find(PATH, TENANT) is not None
    assert (await models.page(TENANT, 3, 1, "default"))[1] == catalogue_rows.MODELS
    assert len(await active.list_ids(TENANT, 20, 0)) == catalogue_rows.MODELS
    await active.contents("s00000x4")
    await active.look(300.0)
    assert len((await SessionSearch(catalogue).page(TENANT, SessionQuery(), 3))[0]) == 3
    reads: tuple[Callable[[Connection], object], ...] = (
        lambda c: runs.runs_of(c, TENANT, 100),
        lambda c: runs.open_samplers(c, TENANT, 50),
        lambda c: runs.pending_of(c, TENANT, 200),
        lambda c: usage_report.report(c, *usage_report.last_days(7), tenant=TENANT),
        lambda c: quotas.living_samplers(c, TENANT),
        lambda c: adapter_versions.in_use(c, time.time() - 600, 8),
        lambda c: adapter_versions.closed(c, time.time() - 600, 8),
        lambda c: session_ends.over_sessions(c),
    )
    for read in reads:
        catalogue.read(read)
    assert catalogue.read(lambda c: quotas.stored_bytes(c, TENANT)) == 100 * 10**6
    whole = [step for step in whole_reads(catalogue, sent) if OF_PUBLISHED not in step and OF_OPEN not in step]
    assert whole == []


def test_a_tenants_bytes_are_summed_once_and_count_what_was_saved_since(catalogue: Database) -> None:
    of_tenant = quotas.StoredBytes(TENANT)
    before = catalogue.read(of_tenant.now)
    saved = catalogue.read(lambda c: stored_at(c, PATH))
    assert saved is not None

    def add(connection: Connection) -> int:
        for tenant, name in ((TENANT, "new"), (OTHER, "of another")):
            path = TinkerPath(PATH.model_id, PATH.kind, name)
            put(connection, replace(saved, tenant=tenant, path=path, size_bytes=7))
        return of_tenant.now(connection)

    assert catalogue.write(add) == before + 7
    assert catalogue.read(quotas.StoredBytes(TENANT).now) == before + 7


async def test_pages_are_read_in_the_order_of_an_index_and_counted_by_it(
    catalogue: Database, writer: GroupCommitWriter, sent: Sent
) -> None:
    """A page reads its own rows, and the count no row, however many a tenant has: nothing is sorted."""
    stored, models, active = Checkpoints(catalogue, writer), Models(catalogue, writer), Sessions(catalogue, writer)
    await models.page(TENANT, 3, 1)
    await active.list_ids(TENANT, 20, 0)
    await SessionSearch(catalogue).page(TENANT, SessionQuery(statuses=(Status("active"),)), 3)
    for seen in (Seen(), Seen(published=True)):
        await CheckpointSearch(catalogue).page(TENANT, CheckpointQuery(seen), 20)
    catalogue.read(lambda c: runs.runs_of(c, TENANT, 100))
    ordered = [(s, p) for s, p in sent if "ORDER BY" in s and "run_steps" not in s]
    assert len(ordered) == 7
    steps = plans(catalogue, ordered)
    assert [step for step in steps if "TEMP B-TREE" in step or "Sort" in step] == []
    sent.clear()
    for seen in (Seen(), Seen(published=True)):
        await stored.page(TENANT, 20, 0, seen)
    counts = [(s, p) for s, p in sent if "count(" in s]
    assert len(counts) == 3
    reads = [step for step in plans(catalogue, counts) if "checkpoints" in step]
    assert len(reads) == 3
    assert all("COVERING INDEX" in step or "Index Only Scan" in step for step in reads), reads
    sent.clear()
    await stored.latest([PATH.model_id], TENANT, Seen())
    assert [step for step in plans(catalogue, sent) if "model_id=?" in step or "Cond: ((model_id)" in step]


def sweeper_on(database: Database, url: str, tmp_path: Path) -> FileSweeper:
    config = load_config({"state_dir": tmp_path, "database_url": url})
    return FileSweeper(config, database, open_store(config))


def test_a_sweep_of_files_reads_no_large_table_whole_and_deletes_nothing_that_is_used(
    catalogue: Database, migrated_url: str, tmp_path: Path, sent: Sent
) -> None:
    files = [each for _, files in catalogue_rows.catalogue(200, time.time()) for each in files]
    keys = dict(catalogue.read(lambda c: c.execute(select(checkpoints.c.weights, checkpoints.c.store_key)).all()))
    catalogue_rows.make(tmp_path, [(version, keys[version]) for version, _ in files])
    sweeper = sweeper_on(catalogue, migrated_url, tmp_path)
    sent.clear()
    for _ in range(2):
        sweeper.drop_idle()
        assert sweeper.unused_adapters() == []
        sweeper.delete_files()
    assert whole_reads(catalogue, sent) == []
    for version, _ in files:
        assert (tmp_path / "checkpoints" / keys[version]).is_dir()


def test_each_sweep_goes_on_where_the_last_one_ended(
    database: Database, migrated_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "LOOKED", 4)
    monkeypatch.setattr(sweeping, "MAX_NAMED", 2)
    versions = [AdapterVersion.of(f"m{number % 3}", number) for number in range(1, 8)]
    catalogue_rows.make(tmp_path, [(version, f"m{version.number % 3}/saved-{version.number}") for version in versions])
    sweeper = sweeper_on(database, migrated_url, tmp_path)
    found = [sweeper.unused_adapters() for _ in range(4)]
    assert [len(each) for each in found] == [2, 2, 2, 1]
    assert sorted(map(str, sum(found, []))) == sorted(map(str, versions))
    left = []
    for _ in range(2):
        sweeper.delete_files()
        left.append(len(list(tmp_path.glob("checkpoints/*/saved-*"))))
    assert left == [3, 0]


@pytest.fixture
def between(migrated_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Another process writes in each pause of a sweep. Returns the numbers of its writes, which fail while a
    transaction of the sweep is open."""
    with closing(Database(migrated_url)) as other:
        written: list[int] = []

        def write(connection: Connection) -> None:
            if other.is_sqlite:
                connection.exec_driver_sql("PRAGMA busy_timeout=0")
            else:
                connection.exec_driver_sql("SET LOCAL lock_timeout = 1")
            connection.execute(update(sessions).values(heartbeat_at=float(len(written))))

        def pause(_: float) -> None:
            other.write(write)
            written.append(len(written))

        monkeypatch.setattr("time.sleep", pause)
        yield written


def test_expired_checkpoints_go_in_steps_with_other_writes_between(
    database: Database, migrated_url: str, tmp_path: Path, between: list[int]
) -> None:
    rows, _ = catalogue_rows.old(1200, time.time())
    database.write(lambda c: catalogue_rows.add(c, rows))
    sweeper = sweeper_on(database, migrated_url, tmp_path)
    sweeper.unused_adapters()
    assert database.read(lambda c: c.execute(select(func.count()).select_from(checkpoints)).scalar_one()) == 0
    assert len(between) >= 120 // sweeping.STEP_ROWS


def test_sampling_sessions_of_an_ended_session_close_in_steps_with_other_writes_between(
    database: Database, between: list[int]
) -> None:
    rows, _ = catalogue_rows.old(1500, time.time())
    del rows["futures"], rows["checkpoints"]
    database.write(lambda c: catalogue_rows.add(c, rows))
    database.write(lambda c: c.execute(update(samplers).values(status="active", closed_at=None)))
    end_sessions(database)
    closed = select(func.count()).select_from(samplers).where(samplers.c.status == "closed")
    assert database.read(lambda c: c.execute(closed).scalar_one()) == 600
    assert len(between) == 600 // session_ends.CLOSE_ROWS
    assert database.read(session_ends.over_sessions) == []


async def test_old_rows_go_in_steps_the_oldest_first_and_those_of_living_sessions_stay(
    database: Database, writer: GroupCommitWriter, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = catalogue_rows.old(150, time.time())
    del rows["checkpoints"]
    living = [catalogue_rows.sampler("s", n, AdapterVersion.of("m", n), TENANT, 0.0, float(n)) for n in range(1, 31)]
    for row in living:
        row["status"] = "dropped"
    rows["sampling_sessions"] += living
    rows["sessions"].append(rows["sessions"][0] | {"id": "s", "status": "active"})
    database.write(lambda c: catalogue_rows.add(c, rows))
    monkeypatch.setattr(retention, "FORGET_ROWS", 10)
    monkeypatch.setattr(retention, "LOOK_ROWS", 25)
    sent.clear()
    await Retention(database, writer, 3600.0).sweep()
    left = database.read(lambda c: c.execute(select(samplers.c.session_id)).scalars().all())
    assert left == ["s"] * 30
    deleted = [p for s, p in sent if s.startswith("DELETE FROM sampling_sessions")]
    assert [len(each) for each in deleted] == [10, 10, 5, 10, 10, 5, 10]
    numbers = [
        int(str(each).rpartition(":")[2]) for p in deleted for each in (p.values() if isinstance(p, dict) else p)
    ]
    assert numbers == list(range(1, 61))


async def test_pages_go_through_thousands_of_checkpoints_each_once(
    database: Database, writer: GroupCommitWriter
) -> None:
    """Own ones and published ones of others together, newest first; many of the same time."""
    own = {"base_model": "tiny", **catalogue_rows.LORA}
    rows = []
    for number in range(1, 12_001):
        tenant, public = (TENANT, number % 7 == 0) if number % 2 else (OTHER, number % 4 == 0)
        row = catalogue_rows.checkpoint(AdapterVersion.of(tenant, number), f"k/{number}", number // 100, own)
        rows.append(row | {"tenant": tenant, "public": public})
    database.write(lambda c: c.execute(insert(checkpoints), rows))
    visible = sorted((n for n in range(1, 12_001) if n % 2 or n % 4 == 0), key=lambda n: (n // 100, n), reverse=True)
    seen, after = Seen(published=True), None
    found: list[int] = []
    while after is not None or not found:
        page, after = await CheckpointSearch(database).page(TENANT, CheckpointQuery(seen, after=after), 1_500)
        found += [int(each.store_key.partition("/")[2]) for each in page]
    assert found == visible
    page, total = await Checkpoints(database, writer).page(TENANT, 50, 6_000, seen)
    assert total == len(visible)
    assert [int(each.store_key.partition("/")[2]) for each in page] == visible[6_000:6_050]
