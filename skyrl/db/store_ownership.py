"""Marks a checkpoint store as one database's.

A database deletes the checkpoints in its store that it has no rows for. So two databases on one store would delete each
other's checkpoints; a database and a copy of it would, too. The mark is a random word that the database keeps, and the
place of the database, which differs for a copy.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, insert, select, text

from skyrl.config.server import ConfigError, ServerConfig
from skyrl.db.database import Database
from skyrl.db.tables import StoreRow
from skyrl.storage.base import OWNER, StoreError
from skyrl.storage.registry import open_store

stores = StoreRow.__table__  # type: ignore[attr-defined]


def claim_store(config: ServerConfig, database: Database, server: str) -> None:
    """Mark the configured store as this database's, or check the mark. The store in the state directory needs no mark.
    `server` is the name of this server; a server in a copy of its state directory has another name.

    Raises ConfigError when the store cannot be used, or belongs to another database or to another copy of this one.
    """
    url = config.checkpoint_store
    if url is None:
        return

    def known(connection: Connection) -> str:
        row = connection.execute(select(stores.c.owner).where(stores.c.url == url)).first()
        if row is not None:
            return row.owner
        owner = secrets.token_hex(16)
        connection.execute(insert(stores), {"url": url, "owner": owner})
        return owner

    owner = database.write(known)
    home = server if database.is_sqlite else database.read(_place)
    try:
        marked = open_store(config).claim(f"{owner} {home}", instead_of=owner)  # earlier versions wrote the word alone
    except StoreError as error:
        raise ConfigError(f"checkpoint_store: {error}") from error
    marked_owner, _, marked_home = marked.partition(" ")
    if marked_owner != owner:
        raise ConfigError(
            f"checkpoint_store: {url} belongs to another server's database, whose checkpoints this one would take for "
            f"leftovers. Use another prefix; or, if that database is gone for good, delete {OWNER!r} in the store, and "
            "what it holds is swept"
        )
    if marked_home != home:
        raise ConfigError(
            f"checkpoint_store: {url} is used with another copy of this database ({marked_home}; this one is {home}). "
            "Two copies would delete each other's newer checkpoints as leftovers. To try a backup, give it a copy of "
            f"the store under another URL; or, if the other copy is gone for good, delete {OWNER!r} in the store"
        )


def _place(connection: Connection) -> str:
    """Names the database and its PostgreSQL cluster. All servers on the database read the same name. A database that
    was restored from a dump has another one."""
    query = """
        SELECT CASE WHEN has_function_privilege('pg_control_system()', 'execute')
                    THEN (SELECT system_identifier FROM pg_control_system()) END, oid
        FROM pg_database WHERE datname = current_database()
    """
    cluster, number = connection.execute(text(query)).one()
    return f"postgresql-{cluster or 'unknown'}-{number}"
