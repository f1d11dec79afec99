"""`skyrl db`: back up, check, shrink and upgrade a server's database; copy it from SQLite to PostgreSQL.

`open_database` opens the server's database for every command of an operator. The server may run or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from skyrl.base.config.server import ServerConfig
    from skyrl.storage.db.database import Database


StateDir = Annotated[Path | None, typer.Option(help="The server's state directory. Default: ~/.local/share/skyrl.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="The server's database, if it is not in the state directory.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The server's TOML file.")]

_NAME_DATABASE = (
    "name the server's database with --config, --state-dir or --database-url (before the server's first start, "
    "`skyrl keys create --make-database` makes it)"
)


def in_database(database: Database) -> str:
    """The database's name in a sentence, without its password. Commands print which database they have changed."""
    from skyrl.storage.db.database import shown_url

    return f"in the database {database.file or shown_url(database.url)}"


def refusal(command: str, message: str) -> typer.Exit:
    """Print why `command` is refused. Returns the exception that ends the command, for the caller to raise."""
    typer.echo(f"skyrl {command}: {message}", err=True)
    return typer.Exit(2)


@contextmanager
def open_database(
    command: str,
    state_dir: Path | None,
    database_url: str | None,
    config: Path | None,
    *,
    make: bool = False,
    any_schema: bool = False,
    alone: bool = False,
) -> Iterator[tuple[ServerConfig, Database]]:
    """The configuration and the server's database. With `make`, a database that does not exist is made. With `alone`,
    no server may run in the state directory.

    A database of an older version, or an empty one, is refused unless `any_schema`: `skyrl serve` migrates it. An error
    ends `command` with one line.
    """
    import sqlite3

    from skyrl.base.config.loading import load_config
    from skyrl.base.config.server import ConfigError
    from skyrl.cli.launcher.state_dir import lock_state_dir
    from skyrl.storage.db.database import Database, shown_url, sqlite_file
    from skyrl.storage.db.faults import DatabaseError, reason
    from skyrl.storage.db.keys import KeyRefused
    from skyrl.storage.db.migrate import SchemaError, migrate, newest_revision, revision_of

    try:
        with ExitStack() as resources:
            loaded = load_config({"state_dir": state_dir, "database_url": database_url}, config)
            if not make and (file := sqlite_file(loaded.database)) is not None and not file.is_file():
                raise ConfigError(f"there is no database {file}: {_NAME_DATABASE}")
            database = Database(loaded.database)
            resources.callback(database.close)
            if alone:
                resources.enter_context(lock_state_dir(loaded.state_dir))
            revision = revision_of(database)  # raises for a database that this version cannot use
            if revision is None and make:
                migrate(database)
            elif revision is None and not any_schema:
                raise ConfigError(f"the database {shown_url(database.url)} is empty: {_NAME_DATABASE}")
            elif revision != newest_revision() and not any_schema:
                raise SchemaError("the database has an older version's schema: start the server once to upgrade it")
            yield loaded, database
    except (ConfigError, SchemaError, KeyRefused, OSError, sqlite3.Error, DatabaseError) as error:
        raise refusal(command, reason(error)) from error


def print_table(lines: list[tuple[str, ...]]) -> None:
    """Print lines in columns. The first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


app = typer.Typer(help="Back up, check, vacuum, upgrade and import the database.", no_args_is_help=True)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The backup to write; the file must not exist.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Copy a SQLite database, as it is at one moment, into FILE. The server may run meanwhile."""
    from skyrl.storage.db import maintenance

    with open_database("db", state_dir, database_url, config, any_schema=True) as (_, database):
        size = maintenance.backup(database, file)
    typer.echo(f"{file}: {size} bytes")


@app.command()
def check(state_dir: StateDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Report problems of the file, the rows and the schema. Exits with 1 if it finds any."""
    from skyrl.storage.db import maintenance

    with open_database("db", state_dir, database_url, config, any_schema=True) as (_, database):
        found = maintenance.problems(database)
    for line in found or ["the database is sound"]:
        typer.echo(line)
    raise typer.Exit(1 if found else 0)


@app.command()
def vacuum(state_dir: StateDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Shrink the file by its free space. Requests that write wait meanwhile; best done while the server is down."""
    from skyrl.storage.db import maintenance

    with open_database("db", state_dir, database_url, config, any_schema=True) as (_, database):
        before = database.size()
        maintenance.vacuum(database)
        after = database.size()
    typer.echo(f"{before} bytes before, {after} bytes now")


@app.command()
def upgrade(state_dir: StateDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Upgrade the database to this version's schema, as the server does when it starts. The server must be down."""
    from skyrl.storage.db.migrate import migrate, revision_of

    with open_database("db", state_dir, database_url, config, any_schema=True, alone=True) as (_, database):
        before = revision_of(database)
        migrate(database)
        after = revision_of(database)
    typer.echo(f"the schema is at revision {after}; it was at {before or 'none'}")


@app.command("import")
def import_rows(
    file: Annotated[Path, typer.Argument(help="The SQLite database of a server that has stopped, or a backup of it.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Copy all rows of the SQLite database FILE into the server's PostgreSQL database, which must be empty."""
    from contextlib import closing

    from skyrl.base.config.server import ConfigError
    from skyrl.cli.launcher.state_dir import lock_state_dir
    from skyrl.storage.db.database import Database
    from skyrl.storage.db.maintenance import carry_over

    with open_database("db", state_dir, database_url, config, any_schema=True) as (_, target), ExitStack() as resources:
        if target.is_sqlite:
            raise ConfigError("the server's database is SQLite: give PostgreSQL's URL in SKYRL_DATABASE_URL")
        if not file.is_file():
            raise ConfigError(f"there is no database {file}")
        if (file.parent / "lock").exists():  # in a state directory: its server must have stopped
            resources.enter_context(lock_state_dir(file.parent))
        source = resources.enter_context(closing(Database(f"sqlite:///{file}")))
        counts = carry_over(source, target)
    for table, rows in counts.items():
        typer.echo(f"{table}: {rows}")
    typer.echo(f"{sum(counts.values())} rows copied and compared")
