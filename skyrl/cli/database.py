"""Opens the server's database for an operator's commands. The server may run or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # importing the database takes longer than `skyrl --help` may
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
    refusals: tuple[type[Exception], ...] = (),
) -> Iterator[tuple[ServerConfig, Database]]:
    """The configuration and the server's database. With `make`, a database that does not exist is made.

    A database of an older version is refused: `skyrl serve` migrates it. An error, also an error in `refusals`, ends
    `command` with one line.
    """
    from skyrl.base.config.loading import load_config
    from skyrl.base.config.server import ConfigError
    from skyrl.storage.db.database import Database, shown_url, sqlite_file
    from skyrl.storage.db.faults import DatabaseError, reason
    from skyrl.storage.db.migrate import SchemaError, migrate, newest_revision, revision_of

    try:
        loaded = load_config({"state_dir": state_dir, "database_url": database_url}, config)
        if not make and (file := sqlite_file(loaded.database)) is not None and not file.is_file():
            raise ConfigError(f"there is no database {file}: {_NAME_DATABASE}")
        database = Database(loaded.database)
        try:
            revision = revision_of(database)
            if revision is None and make:
                migrate(database)
            elif revision is None:
                raise ConfigError(f"the database {shown_url(database.url)} is empty: {_NAME_DATABASE}")
            elif revision != newest_revision():
                raise SchemaError("the database has an older version's schema: start the server once to upgrade it")
            yield loaded, database
        finally:
            database.close()
    except (ConfigError, SchemaError, OSError, DatabaseError, *refusals) as error:
        raise refusal(command, reason(error)) from error


def print_table(lines: list[tuple[str, ...]]) -> None:
    """Print lines in columns. The first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
