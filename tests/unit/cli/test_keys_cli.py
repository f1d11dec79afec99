"""`skyrl keys` creates, lists and revokes keys; cases that it refuses, and that it stores no secret."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update
from typer.testing import CliRunner, Result

from skyrl.api.access import tenant_of_key
from skyrl.cli.main import app
from skyrl.storage.db import keys as key_rows
from skyrl.storage.db.audit import audit_events
from skyrl.storage.db.database import Database
from skyrl.storage.db.keys import api_keys
from skyrl.storage.db.row_caches import Keys
from skyrl.storage.db.sessions import sessions
from tests.databases import make_tables, url_of
from tests.postgres_server import KIND, ON_SQLITE


class Operator:
    """Runs `skyrl keys` against one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        command, *rest = arguments
        options = ["--state-dir", str(self.state_dir)]
        options += ["--database-url", url_of(self.state_dir)] if KIND == "postgres" else []
        return CliRunner().invoke(app, ["keys", command, *options, *rest], input=stdin)

    def create(self, *arguments: str, stdin: str | None = None) -> str:
        done = self.run("create", "--make-database", *arguments, stdin=stdin)
        assert done.exit_code == 0, done.output
        return done.stdout.removesuffix("\n")

    def lines(self, *arguments: str) -> list[list[str]]:
        """The cells of `skyrl keys list`, without the head."""
        done = self.run("list", *arguments)
        assert done.exit_code == 0, done.output
        head, *lines = done.stdout.splitlines()
        assert head.split("  ")[0] == "KEY"
        return [re.split(r" {2,}", line) for line in lines]

    def read(self, query: Any) -> list[Any]:
        database = Database(url_of(self.state_dir))
        try:
            return database.read(lambda connection: list(connection.execute(query)))
        finally:
            database.close()


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    monkeypatch.delenv("SKYRL_STATE_DIR", raising=False)
    monkeypatch.delenv("SKYRL_DATABASE_URL", raising=False)
    return Operator(tmp_path / "state")


def refusal(done: Result) -> str:
    """The one line of stderr that gives the reason."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line.removeprefix("skyrl keys: ")


def test_a_key_is_printed_once_and_its_secret_is_stored_nowhere(operator: Operator) -> None:
    key = operator.create("--name", "laptop of a")
    assert re.fullmatch(r"tml-[0-9a-f]{12}-[\w-]{43}", key)
    secret = key[-43:]
    (line,) = operator.lines()
    assert (line[0], line[2], line[4:]) == (key[4:16], "train,sample", ["-", "-", "good", "laptop of a"])
    assert secret not in "".join(line)
    for file in operator.state_dir.glob("*"):
        assert secret.encode() not in file.read_bytes()
    (row,) = operator.read(select(api_keys))
    assert row.digest not in key.encode()
    (event,) = operator.read(select(audit_events))
    assert (event.tenant, event.event, event.details["key_id"]) == (line[1], "key_created", line[0])
    assert secret not in str(event)


def test_a_key_belongs_to_the_named_tenant_or_to_a_new_one(operator: Operator) -> None:
    operator.create("--name", "one")
    (first,) = operator.lines()
    operator.create("--tenant", first[1], "--scope", "sample", "--scope", "admin", "--expires", "12h", "--name", "two")
    operator.create("--name", "three")
    lines = operator.lines()
    assert [line[-1] for line in lines] == ["one", "two", "three"]
    assert lines[1][1] == first[1] != lines[2][1]
    assert lines[1][2] == "sample,admin"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", lines[1][4])
    assert [line[-1] for line in operator.lines("--tenant", first[1])] == ["one", "two"]
    created, expires = operator.read(select(api_keys.c.created_at, api_keys.c.expires_at))[1]
    assert expires - created == pytest.approx(12 * 3600, abs=60)


def test_a_revoked_key_stays_in_the_list(operator: Operator) -> None:
    key_id = operator.create()[4:16]
    for _ in range(2):
        assert operator.run("revoke", key_id).exit_code == 0
    assert operator.lines()[0][-1] == "revoked"
    events = [row.event for row in operator.read(select(audit_events.c.event).order_by(audit_events.c.id))]
    assert events == ["key_created", "key_revoked"], "the second revocation changed nothing"


def test_a_new_key_adopts_the_tenant_of_an_open_key(operator: Operator) -> None:
    tenant = tenant_of_key("tml-old")
    database = Database(url_of(operator.state_dir))
    make_tables(database)
    session = {"id": "s", "tenant": tenant, "status": "active", "created_at": 1, "heartbeat_at": 1, "tags": []}
    database.write(lambda c: c.execute(insert(sessions), session | {"sdk_version": ""}))
    database.close()
    operator.create("--adopt", stdin="tml-old\n")
    assert operator.lines()[0][1] == tenant
    assert refusal(operator.run("create", "--adopt", stdin="tml-typo\n")).startswith(
        "--adopt: the given key has no key"
    )
    assert refusal(operator.run("create", "--adopt", stdin="")) == "--adopt: give the key on standard input"
    assert len(operator.lines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scope", "write"], "--scope: 'write' is not one of: train, sample, admin"),
        (["--expires", "soon"], "--expires: 'soon' is not a time such as 90d, 12h or 30m"),
        (["--expires", "0d"], "--expires: '0d' is not"),
        (["--expires", "99999d"], "--expires: '99999d' is not"),
        (["--expires", ""], "--expires: '' is not"),
        (["--tenant", "team-a"], "--tenant: 'team-a' is not a tenant"),
        (["--tenant", "0" * 32], f"--tenant: {'0' * 32} has no key, session or checkpoint here"),
        (["--tenant", "0" * 32, "--adopt"], "give --tenant or --adopt, not both"),
        (["--name", "a\nb"], "--name: must be at most 100 printable characters"),
        (["--name", "a" * 101], "--name: must be at most 100 printable characters"),
        (["--database-url", "nosuch://x/y"], "database_url: "),
    ],
)
def test_bad_options_of_create_are_refused_in_one_line_and_make_no_key(
    operator: Operator, arguments: list[str], message: str
) -> None:
    operator.create()
    assert refusal(operator.run("create", *arguments)).startswith(message)
    assert len(operator.lines()) == 1


def test_create_refuses_more_keys_than_the_maximum(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_rows, "MAX_KEYS", 1)
    key_id = operator.create()[4:16]
    assert refusal(operator.run("create")) == "there are 1 keys, and at most 1 are held: revoke some"
    operator.run("revoke", key_id)
    operator.create()


def test_an_expired_key_takes_no_place_and_is_known_for_a_month(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rows, "MAX_KEYS", 1)
    operator.create("--expires", "12h")
    assert "at most 1 are held" in refusal(operator.run("create"))
    database = Database(url_of(operator.state_dir))
    held = Keys(database, None)  # type: ignore[arg-type]
    known: list[int] = []

    def expire(ago_s: float) -> None:
        change = update(api_keys).where(api_keys.c.expires_at.is_not(None)).values(expires_at=time.time() - ago_s)
        database.write(lambda connection: connection.execute(change))
        asyncio.run(held.refresh())
        known.append(len(held))

    expire(1)
    operator.create()
    expire(29 * 86_400)
    expire(31 * 86_400)
    database.close()
    assert known == [1, 2, 1]


@ON_SQLITE
def test_list_without_a_database_is_refused_and_makes_none(operator: Operator) -> None:
    assert f"there is no database {operator.state_dir}/skyrl.db: name the server's database with" in refusal(
        operator.run("list")
    )
    assert not operator.state_dir.exists()
    operator.create()
    assert "no key 'nobody'" in refusal(operator.run("revoke", "nobody"))


@ON_SQLITE
@pytest.mark.parametrize("named", ["state directory", "URL", "nothing"])
def test_create_makes_no_database_without_make_database(
    operator: Operator, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would refuse a key of a database that it does not use, and the operator would not know why."""
    monkeypatch.setenv("HOME", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    options = {
        "state directory": ["--state-dir", str(elsewhere)],
        "URL": ["--database-url", f"sqlite:///{elsewhere}/skyrl.db"],
        "nothing": [],
    }[named]
    done = CliRunner().invoke(app, ["keys", "create", *options])
    message = refusal(done)
    assert message.startswith("there is no database ")
    assert "--config, --state-dir or --database-url" in message
    assert "--make-database" in message
    assert list(tmp_path.iterdir()) == []


def test_create_and_revoke_name_the_database_that_they_changed(operator: Operator) -> None:
    created = operator.run("create", "--make-database")
    database_name = str(operator.state_dir / "skyrl.db") if KIND == "sqlite" else "postgresql"
    assert f"in the database {database_name}" in created.stderr
    assert "skyrl:skyrl@" not in created.stderr
    key_id = created.stdout[4:16]
    assert f"key {key_id} is revoked in the database {database_name}" in operator.run("revoke", key_id).stderr


def test_a_database_of_an_older_or_newer_schema_is_refused(operator: Operator) -> None:
    operator.create()
    database = Database(url_of(operator.state_dir))
    for revision, message in (("0001", "start skyrl 0.2 on it once"), ("9999_later", "made by a newer one")):
        database.write(
            lambda c, to=revision: c.execute(text("UPDATE alembic_version SET version_num = :to"), {"to": to})
        )
        assert message in refusal(operator.run("create"))
    database.close()


def test_a_locked_database_is_reported_in_one_line(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    operator.create()
    monkeypatch.setattr("skyrl.storage.db.database.BUSY_TIMEOUT_MS", 1)
    database = Database(url_of(operator.state_dir))
    with database.writer.begin():
        assert "lock" in refusal(operator.run("create"))
    database.close()
    assert len(operator.lines()) == 1
