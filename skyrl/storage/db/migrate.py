"""Migrates an empty database and one of version 0.2 to this version's schema, and refuses older and newer ones."""

from __future__ import annotations

import re
import time
from functools import cache
from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy.exc import DBAPIError

from alembic import command
from skyrl.storage.db.database import Connection, Database, shown_url
from skyrl.storage.db.faults import is_transient


class SchemaError(RuntimeError):
    """This version of skyrl cannot use the database. The message says why and what to do."""


class DatabaseAway(SchemaError):
    """PostgreSQL cannot be reached now, or accepts no connections yet, or an older version still uses the database. A
    later try may succeed."""


_REFUSED = re.compile(r"FATAL:(?!.*(?:starting up|shutting down|recovery|too many|connection slots))", re.DOTALL)
"""PostgreSQL's messages that it refuses this user, password or database. A later try would fail, too."""


_BEFORE_0_2 = {f"{number:04}" for number in range(1, 18)}
"""Revisions that version 0.2 brings to its own, 0018."""


def _script_location() -> Path:
    packaged = Path(__file__).parent / "alembic"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "alembic"


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_script_location()))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


@cache
def _scripts() -> ScriptDirectory:
    """All revisions. Every process reads their files once."""
    return ScriptDirectory.from_config(_config("sqlite://"))


def newest_revision() -> str | None:
    """The revision to which `migrate` brings a database."""
    return _scripts().get_current_head()


def revision_of(database: Database) -> str | None:
    """The database's revision; None for an empty database.

    Raises SchemaError when a newer version of skyrl or one before 0.2 has made the database, when the database refuses
    the user, and when the file is no database. Raises DatabaseAway when the database cannot be reached now.
    """
    try:
        current = database.read(lambda c: MigrationContext.configure(c).get_current_revision())
    except DBAPIError as error:
        away = not database.is_sqlite and is_transient(error) and _REFUSED.search(str(error.orig)) is None
        kind = DatabaseAway if away else SchemaError
        raise kind(f"the database {shown_url(database.url)} cannot be used: {error.orig}") from error
    if current is not None:
        try:
            _scripts().get_revision(current)
        except CommandError as error:
            if current in _BEFORE_0_2:
                raise SchemaError(
                    f"the database is at revision {current}, of a version before 0.2: start skyrl 0.2 on it once, then "
                    "this version"
                ) from error
            raise SchemaError(
                f"the database is at revision {current}, which this version of skyrl does not know: it was made by a "
                "newer one. Run that version, or use another --database-url or --state-dir."
            ) from error
    return current


SIGN_OF_LIFE_S = 5.0
"""Each process of a server writes to the database at least this often."""


def migrate(database: Database) -> None:
    """Upgrade to the newest revision. Raises SchemaError as `revision_of` does, and when processes of an older version
    still use the database: they could not go on."""
    revision = revision_of(database)
    if revision == newest_revision():
        return
    if revision is not None and not database.is_sqlite:  # a state directory with SQLite belongs to one server
        _check_stopped(database)
    command.upgrade(_config(database.url), "head")


def _check_stopped(database: Database) -> None:
    before = database.read(_beats)
    if not before:
        return
    time.sleep(SIGN_OF_LIFE_S)
    alive = sorted(name for name, beat in database.read(_beats).items() if before.get(name) != beat)
    if alive:
        raise DatabaseAway(
            f"the database is at revision {revision_of(database)}, of an older version, and processes of that version "
            f"use it now ({', '.join(alive)}): stop all servers on this database first"
        )


def _beats(connection: Connection) -> dict[str, float]:
    """The last sign of life of each API process, and of the server that trains. By SQL, for tables of any revision."""
    claims = connection.exec_driver_sql("SELECT owner, held_at FROM training_claim WHERE owner IS NOT NULL").all()
    processes = connection.exec_driver_sql("SELECT id, heartbeat_at FROM api_processes").all()
    return {name: beat for name, beat in (*claims, *processes) if beat is not None}
