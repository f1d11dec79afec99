"""Errors of the database: names under which other packages catch them without SQLAlchemy, and which are transient."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

DatabaseError = SQLAlchemyError
"""The base of every error that the database raises in a read or a write."""

ConstraintError = IntegrityError
"""A row violates a constraint: its key is stored already, or a row to which it refers is missing."""

OPERATIONAL_ERRORS: tuple[type[DatabaseError], ...] = (OperationalError, InterfaceError)
"""Errors of the database's operation, such as a full disk or a lost connection. The statement is not at fault."""

_SQLITE_TRANSIENT = {
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
"""PostgreSQL's code for writes on a standby, and on a server that refuses writes because its disk is nearly full."""


def is_transient(error: BaseException) -> bool:
    """Whether the same statement may succeed later: the database is away, locked, full or read-only for now."""
    if isinstance(error, NoConnectionFree):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        return (getattr(error.orig, "sqlite_errorcode", 0) & 0xFF) in _SQLITE_TRANSIENT
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return True
    return getattr(error.orig, "sqlstate", None) == _READ_ONLY_TRANSACTION


def outage(error: Exception) -> str | None:
    """In words, that the database cannot be used for now. None for another error."""
    return f"the database cannot be used: {reason(error)}" if is_transient(error) else None


def reason(error: BaseException) -> str:
    """The database's message, in one line, without the statement and its values."""
    message = getattr(error, "orig", None) or error
    return " ".join(str(message).split())


def column_with_nul(error: BaseException) -> str | None:
    """The column whose text PostgreSQL refused because it holds the character U+0000. None for another error."""
    if not isinstance(error, DataError):
        return None
    for name, value in _parameters(error.params):
        if isinstance(value, str) and "\0" in value:
            return re.sub(r"_\d+$", "", name)  # SQLAlchemy numbers the parameters of comparisons
    return None


def _parameters(params: object) -> Iterator[tuple[str, object]]:
    if isinstance(params, Mapping):
        yield from params.items()
    elif isinstance(params, Sequence):
        for part in params:
            yield from _parameters(part)
