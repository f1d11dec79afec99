"""The server's database, for commands that an operator runs beside a server or without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

StateDir = Annotated[Path | None, typer.Option(help="The server's state directory. Default: ~/.local/share/skyrl.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="The server's database, if it is not in the state directory.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The server's TOML file.")]

_NAME_IT = (
    "name the server's with --config, --state-dir or --database-url (before the server's first start, "
    "`skyrl keys create --make-database` makes it)"
)


def where(database: Any) -> str:
    """The database in words, without a password: what a command has written to."""
    from skyrl.config.database_url import shown_url

    return f"in the database {database.file or shown_url(database.url)}"


def refused(command: str, message: str) -> typer.Exit:
    """To be raised: ends `command` with a line that says why."""
    typer.echo(f"skyrl {command}: {message}", err=True)
    return typer.Exit(2)


@contextmanager
def opened(
    command: str,
    state_dir: Path | None,
    database_url: str | None,
    config: Path | None,
    *,
    make: bool = False,
    refusals: tuple[type[Exception], ...] = (),
) -> Iterator[tuple[Any, Any]]:
    """The configuration and the server's database, which must be there unless `make` says that it may be made. An older
    version's is left to `skyrl serve`. What is wrong, `refusals` too, ends `command` with a line."""
    from skyrl.config.database_url import shown_url, sqlite_file
    from skyrl.config.server import ConfigError, load_config
    from skyrl.db.database import Database
    from skyrl.db.faults import DatabaseError, reason
    from skyrl.db.migrate import SchemaError, migrate, newest_revision, revision_of

    try:
        loaded = load_config({"state_dir": state_dir, "database_url": database_url}, config)
        if not make and (file := sqlite_file(loaded.database)) is not None and not file.is_file():
            raise ConfigError(f"there is no database {file}: {_NAME_IT}")
        database = Database(loaded.database)
        try:
            revision = revision_of(database)
            if revision is None and make:
                migrate(database)
            elif revision is None:
                raise ConfigError(f"the database {shown_url(database.url)} is empty: {_NAME_IT}")
            elif revision != newest_revision():
                raise SchemaError("the database is an older version's: start the server once, which brings it up")
            yield loaded, database
        finally:
            database.close()
    except (ConfigError, SchemaError, OSError, DatabaseError, *refusals) as error:
        raise refused(command, reason(error)) from error


def print_table(lines: list[tuple[str, ...]]) -> None:
    """Words in columns, the first line being the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
