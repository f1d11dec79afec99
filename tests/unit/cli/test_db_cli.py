"""`skyrl db`: backups, checks, vacuums and upgrades of a database, and the cases that they refuse."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from alembic import command
from skyrl.cli.launcher.state_dir import lock_state_dir
from skyrl.cli.main import app
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import _config, newest_revision, revision_of
from tests.postgres_server import ON_BOTH, ON_POSTGRES, ON_SQLITE

OLDER = "0018"
"""The revision of an older schema."""


def run(database: Database, name: str, *arguments: str) -> Result:
    """Run `skyrl db NAME`: with the state directory of a SQLite file, or with the URL of a PostgreSQL database."""
    if database.file is not None:
        options = ["--state-dir", str(database.file.parent)]
    else:
        options = ["--database-url", database.url]
    return CliRunner().invoke(app, ["db", name, *arguments, *options])


def add_session(database: Database, name: str) -> None:
    columns = "id, tenant, status, created_at, heartbeat_at, sdk_version, tags"
    statement = text(f"INSERT INTO sessions ({columns}) VALUES ('{name}', 't', 'active', 1, 1, '', '[]')")
    database.write(lambda c: c.execute(statement))


def sessions_in(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as connection:
        return [name for (name,) in connection.execute("SELECT id FROM sessions ORDER BY id")]


@ON_SQLITE
def test_backup_holds_the_last_commit_while_another_transaction_runs(database: Database, tmp_path: Path) -> None:
    add_session(database, "committed")
    copy = tmp_path / "copy.db"
    with database.writer.begin() as connection:
        connection.execute(text("UPDATE sessions SET id = 'not yet'"))
        done = run(database, "backup", str(copy))
    assert done.exit_code == 0, done.output
    assert done.output == f"{copy}: {copy.stat().st_size} bytes\n"
    assert sessions_in(copy) == ["committed"]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("copy")] == ["copy.db"]
    restored = Database(f"sqlite:///{copy}")
    assert revision_of(restored) == newest_revision()
    restored.close()


@ON_SQLITE
def test_a_backup_that_fails_replaces_no_file_and_leaves_none(database: Database, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    done = run(database, "backup", str(tmp_path / "old"))
    assert (done.exit_code, done.stderr) == (2, f"skyrl db: {tmp_path / 'old'} exists\n")
    assert (tmp_path / "old").read_text() == "old"
    done = run(database, "backup", str(tmp_path / "nowhere" / "copy"))
    assert done.exit_code == 2
    assert "No such file or directory" in done.stderr
    assert database.file is not None
    database.file.write_bytes(b"torn" * 1000)
    done = run(database, "backup", str(tmp_path / "copy"))
    assert done.exit_code == 2
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "copy.partial").exists()


@ON_POSTGRES
def test_backup_of_postgresql_is_refused_and_names_pg_dump(database: Database, tmp_path: Path) -> None:
    done = run(database, "backup", str(tmp_path / "copy"))
    assert done.exit_code == 2
    assert "use pg_dump" in done.stderr
    assert not (tmp_path / "copy").exists()


@ON_BOTH
def test_check_finds_no_fault_in_a_sound_database(database: Database) -> None:
    add_session(database, "s1")
    done = run(database, "check")
    assert (done.exit_code, done.output) == (0, "the database is sound\n")


@ON_BOTH
def test_check_names_a_missing_table(database: Database) -> None:
    database.write(lambda c: c.execute(text("DROP TABLE meters")))
    done = run(database, "check")
    assert done.exit_code == 1
    assert "schema: differs from this version's" in done.output
    assert "meters" in done.output


@ON_SQLITE
def test_check_names_a_row_that_refers_to_a_missing_row(database: Database) -> None:
    values = "'m', 'gone', 't', 0, 'tiny', 'ready', 8, 32, 1, 1, 1, 1, NULL, 2, 3, 1, 2, 0, 0, NULL, 0"
    assert database.file is not None
    with closing(sqlite3.connect(database.file)) as connection:  # SQLite does not enforce foreign keys here
        connection.execute(f"INSERT INTO models VALUES ({values})")
        connection.commit()
    done = run(database, "check")
    assert (done.exit_code, done.output) == (1, "rows: models row 1 refers to a missing row of sessions\n")


@ON_SQLITE
def test_check_finds_a_damaged_file(database: Database) -> None:
    add_session(database, "s1")
    assert database.file is not None
    with closing(sqlite3.connect(database.file)) as connection:
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'ix_sessions_active_tenant'"
        ).fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with database.file.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(bytes(4096))
    done = run(database, "check")
    assert done.exit_code == 1
    assert all(line.startswith("file: ") for line in done.output.splitlines())


@ON_BOTH
def test_vacuum_shrinks_the_file_and_keeps_the_rows(database: Database) -> None:
    add_session(database, "kept")
    large_rows = [{"name": f"{n}" + "x" * 2_000} for n in range(1_000)]
    database.write(lambda c: c.execute(text("INSERT INTO meters VALUES (:name, 0)"), large_rows))
    database.write(lambda c: c.execute(text("DELETE FROM meters")))
    size_before = database.size()
    done = run(database, "vacuum")
    assert done.exit_code == 0, done.output
    if database.is_sqlite:
        assert database.size() < size_before - 1_000_000
    assert database.read(lambda c: c.execute(text("SELECT id FROM sessions")).scalars().all()) == ["kept"]


@ON_SQLITE
def test_check_reports_an_older_schema_and_upgrade_brings_it_to_the_newest(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'skyrl.db'}")
    command.upgrade(_config(database.url), OLDER)
    add_session(database, "kept")
    done = run(database, "check")
    assert done.exit_code == 1
    assert f"at revision {OLDER}" in done.output
    assert "skyrl db upgrade" in done.output
    with lock_state_dir(tmp_path):
        refused = run(database, "upgrade")
        assert refused.exit_code == 2
        assert "another skyrl server is running" in refused.stderr
        assert revision_of(database) == OLDER
    done = run(database, "upgrade")
    newest = newest_revision()
    assert (done.exit_code, done.output) == (0, f"the schema is at revision {newest}; it was at {OLDER}\n")
    assert run(database, "check").exit_code == 0
    assert sessions_in(tmp_path / "skyrl.db") == ["kept"]
    database.close()


@ON_SQLITE
@pytest.mark.parametrize("name", ["check", "vacuum", "upgrade", "backup"])
def test_a_newer_or_too_old_database_is_refused_and_a_missing_one_is_not_made(
    database: Database, tmp_path: Path, name: str
) -> None:
    arguments = [str(tmp_path / "copy")] if name == "backup" else []
    for version, sentence in (("9999", "newer"), ("0009", "start skyrl 0.2 on it once, then this version")):
        change = text(f"UPDATE alembic_version SET version_num = '{version}'")
        database.write(lambda c, change=change: c.execute(change))
        done = run(database, name, *arguments)
        assert done.exit_code == 2
        assert f"revision {version}" in done.stderr
        assert sentence in done.stderr
    empty = tmp_path / "empty"
    done = CliRunner().invoke(app, ["db", name, *arguments, "--state-dir", str(empty)])
    assert done.exit_code == 2
    assert "there is no database" in done.stderr
    assert not (empty / "skyrl.db").exists()
