"""Which errors of a database pass: it is away, locked, full or read-only for now, and what was asked may be repeated.

Knows the codes of SQLite and PostgreSQL; does not know what was asked.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

DatabaseError = SQLAlchemyError
"""Every error that a read or a write raises for the database's part."""

_SQLITE_PASSES = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
}
_READ_ONLY_TRANSACTION = "25006"
"""PostgreSQL's code for a standby, and for a server that takes no writes because its disk is nearly full."""


def is_transient(error: BaseException) -> bool:
    """Whether the same may succeed later, with nothing changed by us."""
    if isinstance(error, NoConnectionFree):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        return (getattr(error.orig, "sqlite_errorcode", 0) & 0xFF) in _SQLITE_PASSES
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return True
    return getattr(error.orig, "sqlstate", None) == _READ_ONLY_TRANSACTION


def reason(error: BaseException) -> str:
    """What the database said, in a line, without the statement and what was to be stored."""
    said = getattr(error, "orig", None) or error
    return " ".join(str(said).split())


def column_with_nul(error: BaseException) -> str | None:
    """The column for which PostgreSQL refused a text because it holds the character U+0000; None for another error."""
    if not isinstance(error, DataError):
        return None
    for name, value in _parameters(error.params):
        if isinstance(value, str) and "\0" in value:
            return re.sub(r"_\d+$", "", name)  # as SQLAlchemy numbers what is compared
    return None


def _parameters(params: object) -> Iterator[tuple[str, object]]:
    if isinstance(params, Mapping):
        yield from params.items()
    elif isinstance(params, Sequence):
        for part in params:
            yield from _parameters(part)
