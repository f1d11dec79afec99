"""Database URLs: which are accepted, and that no part of a password is ever printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyrl.base.config.keys import readable_url
from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.cli.main import app
from skyrl.storage.db.database import Database, shown_url, sqlite_file

LEAKY = [
    "postgresql://skyrl:hush@ss/w:rd@127.0.0.1:1/skyrl",
    "postgresql://skyrl:ss@hush:more/skyrl",
    "postgres://skyrl:h@hush@127.0.0.1:1/skyrl",
    "postgresql://skyrl:x%40hush@127.0.0.1:1/skyrl",
    "postgresql://127.0.0.1:1/skyrl?user=skyrl&password=hush",
    "mysql://skyrl:hush@127.0.0.1:1/skyrl",
]
"""URLs that no command can connect to. Each holds `hush` in its password, or where a password may be."""


@pytest.mark.parametrize("url", LEAKY)
@pytest.mark.parametrize("source", ["option", "file", "variable"])
@pytest.mark.parametrize("command", [["keys", "list"], ["quotas", "list"], ["db", "check"]], ids="-".join)
def test_password_is_never_printed(
    command: list[str], source: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--state-dir", str(tmp_path / "state")]
    if source == "option":
        options += ["--database-url", url]
    elif source == "file":
        (tmp_path / "skyrl.toml").write_text(f'database_url = "{url}"\n')
        options += ["--config", str(tmp_path / "skyrl.toml")]
    else:
        monkeypatch.setenv("SKYRL_DATABASE_URL", url)
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 2, done.output
    assert "hush" not in done.output
    assert "database" in done.output


def test_the_scheme_postgres_means_postgresql() -> None:
    assert readable_url("postgres://u:p@h:5432/d") == "postgresql://u:p@h:5432/d"
    assert load_config({"database_url": "postgres://u@h/d"}).database == "postgresql://u@h/d"
    assert load_config({"database_url": "postgres://u@h/d", "api_processes": 2}).api_processes == 2
    database = Database("postgres://u@h/d")
    assert (database.url, database.is_sqlite) == ("postgresql://u@h/d", False)
    database.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%40ss%2Fw%3Ard@h:5432/d",
        "postgresql://u:pa/ss?wo#rd@h/d",
        "postgresql://u@[::1]:5432/d?sslmode=require",
        "postgresql:///d?host=/run/postgresql",
        "sqlite:////srv/a@b@c/skyrl.db",
    ],
)
def test_an_unambiguous_url_is_not_changed(url: str) -> None:
    assert readable_url(url) == url


def test_the_refusal_says_how_to_encode_a_password() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"database_url": LEAKY[0]})
    assert str(raised.value) == (
        "database_url: has more than one @, so that the password cannot be told from the host: percent-encode the "
        "password (@ is %40, / is %2F, : is %3A, % is %25)"
    )
    with pytest.raises(ConfigError, match="^database_url: the port is not a number"):
        Database(LEAKY[1])


def test_a_shown_url_keeps_the_host_and_hides_the_password() -> None:
    assert shown_url("postgresql://u:hush@h:1/d") == "postgresql://u:***@h:1/d"
    assert shown_url("postgresql://h/d?password=hush&user=u") == "postgresql://h/d?password=hidden&user=u"
    assert shown_url("sqlite:////srv/skyrl.db") == "sqlite:////srv/skyrl.db"


def test_only_a_sqlite_url_has_a_file() -> None:
    assert sqlite_file("sqlite:////srv/skyrl.db") == Path("/srv/skyrl.db")
    assert sqlite_file("sqlite://") is sqlite_file("sqlite:///:memory:") is sqlite_file("postgresql://h/d") is None
