"""Migrations: the schema and the rows that they make, and the databases that they refuse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError
from sqlmodel import SQLModel

from alembic import command
from skyrl.base.config.server import ConfigError
from skyrl.storage.db import tables  # noqa: F401  (registers the tables)
from skyrl.storage.db.claims import Claim, read_claim
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState, read_state
from skyrl.storage.db.migrate import DatabaseAway, SchemaError, _config, migrate
from tests.postgres_server import ON_BOTH, PostgresServer


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
    assert revision(database) == ScriptDirectory.from_config(_config(database.url)).get_current_head()
    assert table_names(database) == {*SQLModel.metadata.tables, "alembic_version"}


REVISIONS = [script.revision for script in ScriptDirectory.from_config(_config("sqlite://")).walk_revisions()]
IN_CI = (REVISIONS[0], REVISIONS[1], REVISIONS[-1])
"""From the first revision the upgrade goes through all others."""


@ON_BOTH
@pytest.mark.parametrize(
    "older", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.slow) for each in REVISIONS]
)
def test_every_older_revision_is_upgraded_to_the_newest(database: Database, older: str) -> None:
    command.upgrade(_config(database.url), older)
    migrate(database)
    assert revision(database) == REVISIONS[0]
    with database.reader.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == []


@ON_BOTH
def test_an_upgrade_and_a_downgrade_keep_the_rows_of_the_first_revision(database: Database) -> None:
    command.upgrade(_config(database.url), "0001")
    statements = (
        "INSERT INTO sessions VALUES ('s1', 't', 'active', 1, 2, NULL, NULL, '0.38.0', '[]', '{\"a\": \"b\"}')",
        "INSERT INTO models VALUES "
        "('s1:train:0', 's1', 't', 0, 'tiny', 'ready', 8, 32, 1, true, true, true, NULL, 2, 3, 1, 2)",
        "INSERT INTO sampling_sessions VALUES ('s1:sample:0', 's1', 't', 0, 'tiny', NULL, NULL, NULL, 'active', 1)",
    )
    for statement in statements:
        database.write(lambda c, sql=statement: c.execute(text(sql)))
    kept = (
        "SELECT CAST(s.user_metadata AS text), m.sampler_version FROM sessions s JOIN models m ON m.session_id = s.id"
    )
    migrate(database)
    assert database.read(lambda c: tuple(c.execute(text(kept)).one())) == ('{"a": "b"}', 2)
    new = "SELECT s.project_id, s.display_name, s.ended_at, q.clones FROM sessions s CROSS JOIN sampling_sessions q"
    assert database.read(lambda c: tuple(c.execute(text(new)).one())) == (None, None, None, 0)
    command.downgrade(_config(database.url), "0001")
    assert database.read(lambda c: tuple(c.execute(text(kept)).one())) == ('{"a": "b"}', 2)
    assert database.read(lambda c: c.execute(text("SELECT count(*) FROM sampling_sessions")).scalar()) == 1


@ON_BOTH
def test_training_checkpoints_of_the_first_revision_get_their_checkpoint_store_key(database: Database) -> None:
    command.upgrade(_config(database.url), "0001")
    columns = "tenant, model_id, kind, name, directory, base_model, lora_rank, lora_alpha, seed, train_attn, train_mlp"
    columns += ", train_unembed, size_bytes, public, created_at"
    for kind, directory in (("weights", "/state/checkpoints/s1=3Atrain=3A0/a-1"), ("sampler_weights", "/state/x/v1")):
        values = f"'t', 's1:train:0', '{kind}', 'a', '{directory}', 'tiny', 8, 32, 1, true, true, true, 5, false, 1"
        database.write(lambda c, sql=f"INSERT INTO checkpoints ({columns}) VALUES ({values})": c.execute(text(sql)))
    migrate(database)
    kept = "SELECT kind, store_key FROM checkpoints ORDER BY kind"
    rows = database.read(lambda c: [tuple(row) for row in c.execute(text(kept))])
    assert rows == [("sampler_weights", None), ("weights", "s1=3Atrain=3A0/a-1")]
    command.downgrade(_config(database.url), "0002")
    kept = "SELECT directory FROM checkpoints ORDER BY kind"
    rows = database.read(lambda c: c.execute(text(kept)).scalars().all())
    assert rows == ["/state/x/v1", "/state/checkpoints/s1=3Atrain=3A0/a-1"]


@ON_BOTH
def test_adapter_paths_become_relative_and_open_sampling_sessions_are_idle_since_the_upgrade(
    database: Database,
) -> None:
    command.upgrade(_config(database.url), "0005")
    session = "INSERT INTO sessions (id, tenant, status, created_at, heartbeat_at, sdk_version, tags) VALUES "
    session += "('s1', 't', 'active', 1, 2, '', '[]')"
    database.write(lambda c: c.execute(text(session)))
    inside = "adapters/s1=3Atrain=3A0/v000002"
    paths = [
        (f"/var/lib/a state/{inside}", "active"),
        (f"/adapters/x/v000001/{inside}", "closed"),
        (f"/{inside}", "active"),
        ("/opt/adapters/mine/final", "active"),
        (None, "active"),
    ]
    insert = text(
        "INSERT INTO sampling_sessions (id, session_id, tenant, seq_id, base_model, adapter_name, adapter_path, status,"
        " created_at) VALUES (:id, 's1', 't', :number, 'tiny', :name, :path, :status, 1)"
    )
    for number, (path, status) in enumerate(paths):
        row = {"id": str(number), "number": number, "path": path, "status": status}
        row["name"] = None if path is None else f"s1:train:0@{number}"
        database.write(lambda c, row=row: c.execute(insert, row))
    columns = "tenant, model_id, kind, name, directory, base_model, lora_rank, lora_alpha, seed, train_attn, train_mlp"
    columns += ", train_unembed, size_bytes, public, created_at"
    values = f"'t', 'm', 'sampler_weights', 'a', '/state/{inside}', 'tiny', 8, 32, 1, true, true, true, 5, false, 1"
    database.write(lambda c: c.execute(text(f"INSERT INTO checkpoints ({columns}) VALUES ({values})")))
    began = time.time()
    command.upgrade(_config(database.url), "0007")

    def first_column(query: str) -> list[Any]:
        return database.read(lambda c: list(c.execute(text(query)).scalars()))

    def holds_migration_time(column: str) -> list[bool | None]:
        """For each row, whether the column holds the time of the migration; None for null."""
        values = first_column(f"SELECT {column} FROM sampling_sessions ORDER BY id")
        return [None if at is None else began <= at <= time.time() for at in values]

    kept = [inside, inside, inside, "/opt/adapters/mine/final", None]
    assert first_column("SELECT adapter_path FROM sampling_sessions ORDER BY id") == kept
    assert first_column("SELECT directory FROM checkpoints") == [inside]
    assert holds_migration_time("last_used_at") == [True, None, True, True, None]
    assert holds_migration_time("closed_at") == [None, True, None, None, None]
    assert holds_migration_time("size_bytes") == [None] * 5, "the engine measures the sizes later"
    migrate(database)
    database.write(lambda c: c.execute(text("UPDATE sampling_sessions SET status = 'dropped' WHERE id = '0'")))
    command.downgrade(_config(database.url), "0005")
    assert first_column("SELECT status FROM sampling_sessions ORDER BY id")[:3] == ["closed", "closed", "active"]
    assert first_column("SELECT adapter_path FROM sampling_sessions ORDER BY id") == kept


USUAL_DIRECTORY = "adapters/s1=3Atrain=3A0/v00000{number}"
"""The directory of version `number` of model s1:train:0."""


def insert_rows(database: Database, table: str, rows: list[dict[str, Any]]) -> None:
    columns = ", ".join(rows[0])
    statement = text(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(f':{name}' for name in rows[0])})")
    database.write(lambda c: c.execute(statement, rows))


def columns_of(database: Database, table: str, *table_names: str) -> list[tuple[Any, ...]]:
    """The columns of all rows, ordered by id."""
    query = text(f"SELECT {', '.join(table_names)} FROM {table} ORDER BY id")
    return database.read(lambda c: [tuple(row) for row in c.execute(query)])


@ON_BOTH
def test_adapter_names_and_paths_become_references_and_a_downgrade_restores_them(database: Database) -> None:
    command.upgrade(_config(database.url), "0007")
    session = {"id": "s1", "tenant": "t", "status": "active", "created_at": 1, "heartbeat_at": 2}
    insert_rows(database, "sessions", [session | {"sdk_version": "", "tags": "[]"}])
    one, other = "s1:train:0@1", "s1:train:0@2"
    sampled = [
        (None, None, "active"),
        (one, USUAL_DIRECTORY.format(number=1), "active"),
        (one, USUAL_DIRECTORY.format(number=1), "closed"),
        (other, "/opt/lora", "active"),
        (other, "adapters/mine", "dropped"),
    ]
    fixed = {"session_id": "s1", "tenant": "t", "base_model": "tiny", "created_at": 1}
    samplers = [
        {"id": str(n), "seq_id": n, "adapter_name": name, "adapter_path": path, "status": status, **fixed}
        for n, (name, path, status) in enumerate(sampled)
    ]
    insert_rows(database, "sampling_sessions", samplers)
    saved = [
        ("weights", None, None),
        ("weights", None, "/state/checkpoints/s1=3Atrain=3A0/a-1"),
        ("sampler_weights", one, USUAL_DIRECTORY.format(number=1)),
        ("sampler_weights", other, "/opt/lora"),
    ]
    shape = {"lora_rank": 8, "lora_alpha": 32, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
    fixed = {"tenant": "t", "model_id": "s1:train:0", "base_model": "tiny", "size_bytes": 5, "public": False, **shape}
    checkpoints = [
        {"id": n, "kind": kind, "name": f"n{n}", "adapter_name": name, "directory": path, "created_at": 1, **fixed}
        for n, (kind, name, path) in enumerate(saved)
    ]
    insert_rows(database, "checkpoints", checkpoints)
    migrate(database)
    assert columns_of(database, "sampling_sessions", "weights", "old_directory", "status") == [
        ("base", None, "active"),
        (f"adapter:{one}", None, "active"),
        (f"adapter:{one}", None, "closed"),
        (f"adapter:{other}", "/opt/lora", "active"),
        (f"adapter:{other}", "adapters/mine", "dropped"),
    ]
    assert columns_of(database, "checkpoints", "weights", "old_directory") == [
        (None, None),
        (None, "/state/checkpoints/s1=3Atrain=3A0/a-1"),
        (f"adapter:{one}", None),
        (f"adapter:{other}", "/opt/lora"),
    ]
    command.downgrade(_config(database.url), "0007")
    assert columns_of(database, "sampling_sessions", "adapter_name", "adapter_path", "status") == sampled
    assert columns_of(database, "checkpoints", "kind", "adapter_name", "directory") == saved


@ON_BOTH
def test_a_downgrade_closes_sampling_sessions_of_full_weights(database: Database) -> None:
    migrate(database)
    session = {"id": "s1", "tenant": "t", "status": "active", "created_at": 1, "heartbeat_at": 2}
    insert_rows(database, "sessions", [session | {"sdk_version": "", "tags": "[]"}])
    fixed = {"session_id": "s1", "tenant": "t", "base_model": "tiny", "created_at": 1, "status": "active"}
    rows = [{"id": w, "seq_id": n, "weights": w, **fixed} for n, w in enumerate(("base", "full:7"))]
    insert_rows(database, "sampling_sessions", rows)
    command.downgrade(_config(database.url), "0007")
    assert columns_of(database, "sampling_sessions", "id", "adapter_name", "status") == [
        ("base", None, "active"),
        ("full:7", None, "closed"),
    ]


STATE = {"inference_proxy_url": "u", "generation": 3, "training_ready": True, "reason": "r", "vocab_size": 512}
STATE |= {"max_context": 64, "heartbeat_at": 2.0, "updated_at": 4.0, "state_dir": "/state", "activity": "{}"}
CLAIM = {"owner": "server", "held_at": 5.0}


@ON_BOTH
def test_the_claim_and_the_state_of_the_only_engine_are_kept(database: Database) -> None:
    command.upgrade(_config(database.url), "0015")
    insert_rows(database, "engine_state", [{"id": 1, **STATE, **CLAIM}])
    migrate(database)
    assert database.read(read_claim) == Claim("server", 5.0, 2.0)
    kept = EngineState(**{name: value for name, value in STATE.items() if name != "updated_at"})
    assert database.read(read_state) == kept
    assert database.read(lambda c: read_state(c, ("", "acme/model"))) == kept
    insert_rows(database, "engine_state", [{"base_model": "acme/other", **STATE, "generation": 9}])
    command.downgrade(_config(database.url), "0015")
    assert columns_of(database, "engine_state", "id", *STATE, *CLAIM) == [(1, *STATE.values(), *CLAIM.values())]
    migrate(database)
    assert database.read(read_claim) == Claim("server", 5.0, 2.0)


def test_of_several_copies_under_one_copy_key_only_the_first_keeps_the_key(database: Database) -> None:
    command.upgrade(_config(database.url), "0005")
    columns = "tenant, model_id, kind, name, copy_key, base_model, lora_rank, lora_alpha, seed, train_attn, train_mlp"
    columns += ", train_unembed, size_bytes, public, created_at"
    for name, key in (("a", "'k'"), ("b", "NULL"), ("c", "'k'"), ("d", "'other'"), ("e", "NULL"), ("f", "'k'")):
        values = f"'t', 's1:train:0', 'weights', '{name}', {key}, 'tiny', 8, 32, 1, true, true, true, 5, false, 1"
        database.write(lambda c, sql=f"INSERT INTO checkpoints ({columns}) VALUES ({values})": c.execute(text(sql)))
    migrate(database)
    kept = "SELECT name, copy_key FROM checkpoints ORDER BY name"
    expected = [("a", "k"), ("b", None), ("c", None), ("d", "other"), ("e", None), ("f", None)]
    assert database.read(lambda c: [tuple(row) for row in c.execute(text(kept))]) == expected
    copied = columns.replace("name", "'z'")
    again = f"INSERT INTO checkpoints ({columns}) SELECT {copied} FROM checkpoints WHERE name = 'a'"
    with pytest.raises(IntegrityError):
        database.write(lambda c: c.execute(text(again)))
    command.downgrade(_config(database.url), "0005")
    assert database.read(lambda c: [tuple(row) for row in c.execute(text(kept))]) == expected


@ON_BOTH
def test_a_second_migration_changes_nothing(database: Database) -> None:
    migrate(database)
    row = "INSERT INTO engine_state VALUES ('', 'u', 3, false, '', 1, 1, 0, 0, NULL, NULL)"
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
def test_a_downgrade_removes_every_table_and_an_upgrade_makes_them_again(database: Database) -> None:
    migrate(database)
    command.downgrade(_config(database.url), "base")
    assert table_names(database) == {"alembic_version"}
    assert revision(database) is None
    migrate(database)
    assert table_names(database) == {*SQLModel.metadata.tables, "alembic_version"}


@ON_BOTH
def test_a_migration_that_fails_leaves_the_schema_unchanged(database: Database) -> None:
    database.write(lambda c: c.execute(text("CREATE TABLE models (id INTEGER)")))
    with pytest.raises(Exception, match="already exists"):
        migrate(database)
    assert table_names(database) - {"alembic_version"} == {"models"}
