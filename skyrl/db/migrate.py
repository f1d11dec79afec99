"""Bring a database to this version's schema: migrate an empty or older one, refuse a newer one."""

from __future__ import annotations

import logging
import re
import sqlite3
from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy.exc import DBAPIError

from alembic import command
from skyrl.db.database import Database
from skyrl.db.faults import is_transient
from skyrl.db.urls import shown_url

logger = logging.getLogger(__name__)


class SchemaError(RuntimeError):
    """The database cannot be used by this version of skyrl; the message says why and what to do."""


class DatabaseAway(SchemaError):
    """PostgreSQL cannot be reached now, or takes no connections yet: the same may succeed later."""


_REFUSED = re.compile(r"FATAL:(?!.*(?:starting up|shutting down|recovery|too many|connection slots))", re.DOTALL)
"""PostgreSQL answers, and does not take this user, password or database."""


def _script_location() -> Path:
    packaged = Path(__file__).parent / "alembic"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "alembic"


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_script_location()))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def newest_revision() -> str | None:
    """What `migrate` brings a database to."""
    return ScriptDirectory.from_config(_config("sqlite://")).get_current_head()


def revision_of(database: Database) -> str | None:
    """The database's revision; None when it is empty.

    Raises SchemaError when it was made by a newer skyrl (its revision is unknown here), refuses the user, or is no
    database at all, and DatabaseAway when it cannot be reached now.
    """
    try:
        current = database.read(lambda c: MigrationContext.configure(c).get_current_revision())
    except DBAPIError as error:
        away = not database.is_sqlite and is_transient(error) and _REFUSED.search(str(error.orig)) is None
        kind = DatabaseAway if away else SchemaError
        raise kind(f"the database {shown_url(database.url)} cannot be used: {error.orig}") from error
    if current is not None:
        try:
            ScriptDirectory.from_config(_config(database.url)).get_revision(current)
        except CommandError as error:
            raise SchemaError(
                f"the database is at revision {current}, which this version of skyrl does not know: it was made by a "
                "newer one. Run that version, or use another --database-url or --state-dir."
            ) from error
    return current


def migrate(database: Database) -> None:
    """Upgrade to the newest revision. Raises SchemaError as `revision_of` does.

    A SQLite file from before files gave space back is rewritten once; if it cannot be, it only does not shrink.
    """
    if revision_of(database) != newest_revision():
        command.upgrade(_config(database.url), "head")
    try:
        database.make_reclaimable()
    except sqlite3.Error as error:
        logger.warning("the database's file cannot be made to shrink; tried again at the next start: %s", error)
