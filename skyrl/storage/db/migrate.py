"""Migrates an empty database and one of version 0.2 to this version's schema, and refuses older and newer ones."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy.exc import DBAPIError

from alembic import command
from skyrl.storage.db.database import Database, shown_url
from skyrl.storage.db.faults import is_transient


class SchemaError(RuntimeError):
    """This version of skyrl cannot use the database. The message says why and what to do."""


class DatabaseAway(SchemaError):
    """PostgreSQL cannot be reached now, or accepts no connections yet. A later try may succeed."""


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


def migrate(database: Database) -> None:
    """Upgrade to the newest revision. Raises SchemaError as `revision_of` does."""
    if revision_of(database) != newest_revision():
        command.upgrade(_config(database.url), "head")
