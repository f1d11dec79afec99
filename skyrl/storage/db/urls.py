"""Reads database URLs with SQLAlchemy: the file of a SQLite database, a URL without secrets, a PostgreSQL conninfo.

`skyrl.base.config.database_url` checks a URL first, without SQLAlchemy, so that the configuration loads quickly.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import make_url

_SECRETS = ("password", "sslpassword")
"""Parameters after the `?` that are secrets of PostgreSQL's driver."""


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database. None for another database, and for one in memory."""
    name = make_url(url).database if url.startswith("sqlite:") else None
    return Path(name) if name and name != ":memory:" else None


def shown_url(url: str) -> str:
    """A URL from `readable_url` without its passwords, for messages and logs."""
    parsed = make_url(url)
    query = {name: "hidden" if name in _SECRETS else value for name, value in parsed.query.items()}
    return parsed.set(query=query).render_as_string(hide_password=True)


def postgres_conninfo(url: str) -> str:
    """A PostgreSQL URL as libpq reads it, with its password: for connections that do not go through SQLAlchemy."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
