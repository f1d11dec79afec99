"""`skyrl db import` copies the rows of a SQLite database to PostgreSQL; cases that it refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    Text,
    cast,
    insert,
    select,
    text,
)
from sqlmodel import SQLModel
from typer.testing import CliRunner, Result

from alembic import command
from skyrl.cli.launcher.main import lock_state_dir
from skyrl.cli.main import app
from skyrl.storage.db.columns import WeightsText
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import _config, migrate
from tests.postgres_server import PostgresServer

EXACT = 0.1 + 0.2
LARGE = 2**62
BYTES = bytes(range(256))
UNICODE = "a'\"\\ ü ✓ 𝄞\n"
JSON_TEXT = '{"z": [1, null, 1.50], "a": "\\u0000 ü"}'


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(f"sqlite:///{tmp_path / 'old' / 'skyrl.db'}")) as database:
        migrate(database)
        yield database


@pytest.fixture
def target(postgres: PostgresServer) -> Iterator[Database]:
    name = postgres.new_database()
    with closing(Database(postgres.url(name))) as database:
        yield database
    postgres.drop_database(name)


def run(source: Database, target: Database) -> Result:
    return CliRunner().invoke(app, ["db", "import", str(source.file), "--database-url", target.url])


def value_for(column: Column[Any], number: int, *, full: bool) -> object:
    """A value of the column's type that is hard to copy exactly. Numbered columns and keys differ by `number`."""
    if isinstance(column.type, JSON):
        return JSON_TEXT if full else None if column.nullable else "null"
    must_differ = column.primary_key or column.unique or column.foreign_keys
    if not full and column.nullable and not must_differ:
        return None
    if isinstance(column.type, WeightsText):
        return f"adapter:{UNICODE}{number}"
    if isinstance(column.type, LargeBinary):
        return BYTES
    if isinstance(column.type, Boolean):
        return full
    if isinstance(column.type, Float):
        return EXACT
    if isinstance(column.type, BigInteger):
        return LARGE + number
    if isinstance(column.type, Integer):
        return number
    return f"{UNICODE}{number}"


def fill(database: Database) -> None:
    """Add two rows to every table: one with a value in each column, one with null in each column that allows null."""
    with database.writer.begin() as connection:
        for table in SQLModel.metadata.sorted_tables:
            for number, full in ((7, True), (8, False)):
                row = {column.name: value_for(column, number, full=full) for column in table.columns}
                names, placeholders = ", ".join(row), ", ".join(f":{name}" for name in row)
                connection.execute(text(f"INSERT INTO {table.name} ({names}) VALUES ({placeholders})"), row)


def content(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    def read(connection: Any) -> dict[str, list[tuple[Any, ...]]]:
        rows = {}
        for table in SQLModel.metadata.sorted_tables:
            columns = [cast(c, Text) if isinstance(c.type, JSON) else c for c in table.columns]
            rows[table.name] = sorted((tuple(row) for row in connection.execute(select(*columns))), key=repr)
        return rows

    return database.read(read)


def test_import_copies_every_row_of_every_table_unchanged(source: Database, target: Database) -> None:
    fill(source)
    done = run(source, target)
    assert done.exit_code == 0, done.output
    assert content(target) == content(source)
    tables = len(SQLModel.metadata.sorted_tables)
    assert done.output.endswith(f"{2 * tables} rows copied and compared\n")
    assert "futures: 2\n" in done.output
    assert CliRunner().invoke(app, ["db", "check", "--database-url", target.url]).exit_code == 0


def test_new_rows_are_numbered_after_the_copied_ones(source: Database, target: Database) -> None:
    fill(source)
    assert run(source, target).exit_code == 0
    events = SQLModel.metadata.tables["audit_events"]
    row = {"at": 1.0, "tenant": "t", "event": "key_created", "details": {}}
    target.write(lambda c: c.execute(insert(events), row))
    assert target.read(lambda c: c.execute(select(events.c.id).order_by(events.c.id)).scalars().all()) == [
        LARGE + 7,
        LARGE + 8,
        LARGE + 9,
    ]


def test_a_target_with_rows_is_refused_and_not_changed(source: Database, target: Database) -> None:
    fill(source)
    assert run(source, target).exit_code == 0
    before = content(target)
    done = run(source, target)
    assert done.exit_code == 2
    assert "holds rows: give an empty database" in done.stderr
    assert content(target) == before


def test_a_text_with_a_zero_byte_is_named_and_nothing_is_copied(source: Database, target: Database) -> None:
    source.write(lambda c: c.execute(text("INSERT INTO meters VALUES ('fine', 1)")))
    source.write(lambda c: c.execute(text("INSERT INTO meters VALUES (:name, 1)"), {"name": "a\0b"}))
    done = run(source, target)
    assert done.exit_code == 2
    assert "U+0000, which name of meters ['a\\x00b'] holds" in done.stderr
    assert not any(content(target).values())


def test_import_keeps_no_rows_if_they_differ_in_postgresql(source: Database, target: Database) -> None:
    fill(source)
    migrate(target)
    change = """
        CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN NEW.counted_until := 0; RETURN NEW; END $$;
        CREATE TRIGGER change BEFORE INSERT ON meters FOR EACH ROW EXECUTE FUNCTION change();
    """
    target.write(lambda c: c.execute(text(change)))
    done = run(source, target)
    assert done.exit_code == 2
    assert "the rows of meters differ in PostgreSQL: nothing was kept" in done.stderr
    assert not any(content(target).values())


def test_import_is_refused_while_a_server_uses_the_file(source: Database, target: Database) -> None:
    assert source.file is not None
    with lock_state_dir(source.file.parent):
        done = run(source, target)
    assert done.exit_code == 2
    assert "another skyrl server is running" in done.stderr


def test_import_of_an_older_schema_is_refused_and_names_db_upgrade(tmp_path: Path, target: Database) -> None:
    with closing(Database(f"sqlite:///{tmp_path / 'skyrl.db'}")) as older:
        command.upgrade(_config(older.url), "0018")
        done = run(older, target)
    assert done.exit_code == 2
    assert "is at revision 0018, not " in done.stderr
    assert "run `skyrl db upgrade`" in done.stderr


def test_import_needs_a_postgresql_url_and_an_existing_file(source: Database, target: Database, tmp_path: Path) -> None:
    assert source.file is not None
    done = CliRunner().invoke(app, ["db", "import", str(source.file), "--state-dir", str(source.file.parent)])
    assert done.exit_code == 2
    assert "give PostgreSQL's URL in SKYRL_DATABASE_URL" in done.stderr
    missing = CliRunner().invoke(app, ["db", "import", str(tmp_path / "none.db"), "--database-url", target.url])
    assert missing.exit_code == 2
    assert f"there is no database {tmp_path / 'none.db'}" in missing.stderr
    assert not (tmp_path / "none.db").exists()


def test_import_does_not_change_the_file(source: Database, target: Database) -> None:
    fill(source)
    assert source.file is not None
    with closing(sqlite3.connect(source.file)) as connection:
        before = list(connection.iterdump())
    assert run(source, target).exit_code == 0
    with closing(sqlite3.connect(source.file)) as connection:
        assert list(connection.iterdump()) == before
