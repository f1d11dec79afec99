"""Whose a checkpoint store is. Two databases on one store would sweep each other's checkpoints as nobody's; a database
and a copy of it would, too.

A store is marked with a word that its database keeps, and with where that database is, which a copy does not share.
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
    """Mark the configured store as this database's, or see that it is; the one in the state directory needs no mark.
    `server` is the name of the server, which another one in a copy of its state directory does not have.

    Raises ConfigError: the store cannot be used, or belongs to another database or to another copy of this one.
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
        marked = open_store(config).claim(f"{owner} {home}", instead_of=owner)  # as earlier versions marked it
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
    """Which database of which PostgreSQL cluster this is: the same for all servers on it, and another one for what was
    restored from a dump."""
    query = """
        SELECT CASE WHEN has_function_privilege('pg_control_system()', 'execute')
                    THEN (SELECT system_identifier FROM pg_control_system()) END, oid
        FROM pg_database WHERE datname = current_database()
    """
    cluster, number = connection.execute(text(query)).one()
    return f"postgresql-{cluster or 'unknown'}-{number}"
