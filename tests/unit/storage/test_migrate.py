"""Migrations: the schema and the rows that they make, and the databases that they refuse."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.runtime.migration import MigrationContext
from sqlalchemy import insert, inspect, text
from sqlmodel import SQLModel

from alembic import command
from skyrl.base.config.server import ConfigError
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.storage.db import migrate as migrations
from skyrl.storage.db import tables  # noqa: F401  (registers the tables)
from skyrl.storage.db.adapter_versions import held
from skyrl.storage.db.checkpoints import store_key_of
from skyrl.storage.db.database import Database
from skyrl.storage.db.maintenance import problems
from skyrl.storage.db.migrate import DatabaseAway, SchemaError, _config, migrate, newest_revision
from skyrl.storage.db.models import Model, add_model
from skyrl.storage.db.run_steps import SampledSums, StepSums, add_passes, add_samples, end_step, history
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.tables import SessionRow
from tests.postgres_server import ON_BOTH, ON_POSTGRES, PostgresServer


@pytest.fixture
def database(empty_url: str):
    database = Database(empty_url)
    yield database
    database.close()


def revision(database: Database) -> str | None:
    with database.reader.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def table_names(database: Database) -> set[str]:
    return set(inspect(database.reader).get_table_names())


@ON_BOTH
def test_an_empty_database_gets_the_newest_schema(database: Database) -> None:
    migrate(database)
    assert revision(database) == newest_revision()
    assert table_names(database) == {*SQLModel.metadata.tables, "alembic_version"}
    assert problems(database) == []


@ON_BOTH
def test_a_step_that_is_open_during_an_upgrade_goes_on_after_it(database: Database) -> None:
    """Version 0.3 adds columns of the run's health, which old rows do not have."""
    command.upgrade(_config(database.url), "0023")
    session = SessionRow(id="s", tenant="one", status="active", created_at=1.0, heartbeat_at=1.0)
    database.write(lambda c: c.execute(insert(sessions), session.model_dump()))
    database.write(add_model(Model("s:train:0", "s", "one", "tiny", LoraSpec(4, 32.0, 1), None), 0))
    for row in (
        "UPDATE models SET steps = 1",
        "INSERT INTO run_steps (model_id, step, updated_at, ended_at, passes, tokens, busy_s, loss_sum, gap_sum, "
        "gap_tokens, clipped_sum, clipped_tokens) VALUES ('s:train:0', 1, 5, 5, 1, 8, 2, 0, 0, 0, 0, 0), "
        "('s:train:0', 2, 6, NULL, 1, 8, 1, 0, 0, 0, 0, 0)",
    ):
        database.write(lambda c, row=row: c.exec_driver_sql(row))
    migrate(database)
    run = "s:train:0"
    database.write(lambda c: add_samples(c, {(run, "one"): SampledSums(samples=4, truncated=1)}))
    database.write(lambda c: add_passes(c, {run: StepSums.of_pass(8, {})}, 0.5))
    database.write(end_step(run, 0.25))
    first, second = database.read(lambda c: history(c, run))
    assert (first.busy_s, first.samples, first.truncated, first.wall_s, first.saves) == (2.0, 0, None, None, 0)
    assert (second.passes, second.tokens, second.busy_s, second.truncated) == (2, 16, 1.75, 0.25)
    assert second.wall_s == pytest.approx(second.ended_at - 5)
    assert problems(database) == []


@ON_POSTGRES
def test_a_database_that_an_older_version_uses_now_is_left_as_it_is(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of that version could not go on."""
    command.upgrade(_config(database.url), "0018")

    def beat(at: float) -> None:
        database.write(lambda c: c.exec_driver_sql(f"UPDATE training_claim SET owner = 'old', held_at = {at}"))
        database.write(lambda c: c.exec_driver_sql(f"UPDATE api_processes SET heartbeat_at = {at}"))

    database.write(lambda c: c.exec_driver_sql("DELETE FROM training_claim"))
    database.write(lambda c: c.exec_driver_sql("INSERT INTO training_claim (id) VALUES (1)"))
    database.write(lambda c: c.exec_driver_sql("INSERT INTO api_processes VALUES ('old/0', 1, 1)"))
    beat(1)
    monkeypatch.setattr(migrations, "time", SimpleNamespace(sleep=lambda _: beat(2)))
    with pytest.raises(SchemaError, match=r"at revision 0018.* use it now \(old, old/0\): stop all servers"):
        migrate(database)
    assert revision(database) == "0018"
    monkeypatch.setattr(migrations, "time", SimpleNamespace(sleep=lambda _: None))
    migrate(database)
    assert revision(database) == newest_revision()


@ON_BOTH
def test_a_database_of_version_0_2_keeps_its_rows(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Version 0.2 leaves out the keys of checkpoints that it could not put into the checkpoint store."""
    command.upgrade(_config(database.url), "0018")
    fixed = (
        "tenant, model_id, base_model, lora_rank, lora_alpha, seed, train_attn, train_mlp, train_unembed, size_bytes"
    )
    values = "'t', 's1:train:0', 'tiny', 8, 32, 1, true, true, true, 5"
    adapter, alone = AdapterVersion.of("m", 1), AdapterVersion.of("m", 2)
    for name, place, weights in (
        ("a", "NULL, NULL", adapter),
        ("b", "'model/b-1', NULL", adapter),
        ("c", "NULL, '/elsewhere/v000001'", alone),
    ):
        row = f"INSERT INTO checkpoints (kind, name, store_key, old_directory, weights, public, created_at, {fixed}) "
        row += f"VALUES ('weights', '{name}', {place}, '{weights}', false, 1, {values})"
        database.write(lambda c, row=row: c.execute(text(row)))
    with caplog.at_level(logging.WARNING):
        migrate(database)
    assert "no files of 2 checkpoints" in caplog.text
    kept = database.read(
        lambda c: [tuple(row) for row in c.execute(text("SELECT id, name, store_key FROM checkpoints"))]
    )
    assert sorted(kept) == [(1, "a", "lost/1"), (2, "b", "model/b-1"), (3, "c", "lost/3")]
    assert database.read(lambda c: store_key_of(c, adapter)) == "model/b-1"
    assert database.read(lambda c: store_key_of(c, alone)) is None, "so the key that follows from its name is tried"
    assert database.read(lambda c: held(c, 0.0, {adapter, alone})) == {adapter, alone}, "their files are not swept"
    assert problems(database) == []


@ON_BOTH
@pytest.mark.parametrize("older", ["0001", "0017"])
def test_a_database_from_before_version_0_2_is_refused_and_not_changed(database: Database, older: str) -> None:
    migrate(database)
    database.write(lambda c: c.execute(text(f"UPDATE alembic_version SET version_num = '{older}'")))
    with pytest.raises(SchemaError, match=f"revision {older}, of a version before 0.2: start skyrl 0.2 on it once"):
        migrate(database)
    assert revision(database) == older


@ON_BOTH
def test_a_second_migration_changes_nothing(database: Database) -> None:
    migrate(database)
    row = "INSERT INTO engine_state VALUES ('', 'u', 3, false, '', 1, 1, 0, 0, NULL, NULL, NULL)"
    database.write(lambda c: c.execute(text(row)))
    migrate(database)
    assert database.read(lambda c: c.execute(text("SELECT generation FROM engine_state")).scalar()) == 3


@ON_BOTH
@pytest.mark.parametrize("made_by", ["by a newer skyrl", "by another program"])
def test_a_database_of_an_unknown_revision_is_refused_and_not_changed(database: Database, made_by: str) -> None:
    if made_by == "by a newer skyrl":
        migrate(database)
    else:
        database.write(lambda c: c.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))")))
        database.write(lambda c: c.execute(text("INSERT INTO alembic_version VALUES ('')")))
    database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999_later'")))
    before = table_names(database)
    with pytest.raises(SchemaError, match="9999_later.*newer"):
        migrate(database)
    assert table_names(database) == before
    assert revision(database) == "9999_later"


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "skyrl.db").write_text("not a database, " * 100)
    database = Database(f"sqlite:///{tmp_path / 'skyrl.db'}")
    with pytest.raises(SchemaError, match="file is not a database"):
        migrate(database)
    database.close()


def test_a_missing_postgresql_database_is_refused_without_showing_the_password(postgres: PostgresServer) -> None:
    database = Database(postgres.url("no_such_database"))
    with pytest.raises(SchemaError, match="no_such_database.*does not exist") as raised:
        migrate(database)
    assert "skyrl:***@127.0.0.1" in str(raised.value)
    assert not isinstance(raised.value, DatabaseAway), "the server answers, so waiting does not help"
    database.close()


URLS = ["skyrl.db", "nosuch://host/name", "oracle://user:secret@host/name", "mysql://user:secret@host/name"]


@pytest.mark.parametrize("url", URLS)
def test_the_refusal_of_a_bad_url_names_the_option(url: str) -> None:
    with pytest.raises(ConfigError, match="^database_url: ") as raised:
        Database(url)
    assert "secret" not in str(raised.value)


@ON_BOTH
def test_a_migration_that_fails_leaves_the_schema_unchanged(database: Database) -> None:
    database.write(lambda c: c.execute(text("CREATE TABLE models (id INTEGER)")))
    with pytest.raises(Exception, match="already exists"):
        migrate(database)
    assert table_names(database) - {"alembic_version"} == {"models"}
