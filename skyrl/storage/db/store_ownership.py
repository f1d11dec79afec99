"""Marks a checkpoint store as one database's.

A server deletes files in its checkpoint store for which its database has no row. So two databases with one store would
delete each other's checkpoints, and so would a database and a copy of it. The mark consists of a random text, which the
database stores, and of a name for the place of the database, which differs for a copy.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, insert, select, text

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.storage.checkpoint_store.base import OWNER, StoreError
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db.checkpoints import count_stored
from skyrl.storage.db.database import Database
from skyrl.storage.db.tables import StoreRow

stores = StoreRow.__table__  # type: ignore[attr-defined]


def claim_store(config: ServerConfig, database: Database, server: str) -> None:
    """Mark the configured store as this database's, or check its mark. The store in the state directory needs no mark.
    `server` is the name of this server; a server on a copy of its state directory has another name.

    Raises ConfigError when the store cannot be used, or belongs to another database or to another copy of this one.
    """
    url = config.checkpoint_store
    if url is None:
        return

    def owner_text(connection: Connection) -> tuple[str, int]:
        """The text, and how many checkpoints the store has had before."""
        row = connection.execute(select(stores.c.owner).where(stores.c.url == url)).first()
        if row is not None:
            return row.owner, count_stored(connection)
        owner = secrets.token_hex(16)
        connection.execute(insert(stores), {"url": url, "owner": owner})
        return owner, 0

    owner, checkpoints = database.write(owner_text)
    home = server if database.is_sqlite else database.read(_place)
    try:
        store = open_store(config)
        if checkpoints and store.owner() is None and not store.stored():
            raise ConfigError(
                f"checkpoint_store: {url} is empty. This database has used it, and has {checkpoints} checkpoints: is "
                "its disk mounted? If they are lost, use another URL"
            )
        marked = store.claim(f"{owner} {home}")
    except StoreError as error:
        raise ConfigError(f"checkpoint_store: {error}") from error
    if not marked:
        raise ConfigError(
            f"checkpoint_store: {OWNER!r} in {url} is empty: a server ended while it wrote it. If no other server "
            "starts on this store now, delete the file"
        )
    marked_owner, _, marked_home = marked.partition(" ")
    if marked_owner != owner:
        raise ConfigError(
            f"checkpoint_store: {url} belongs to another server's database, and this server would delete that "
            "database's checkpoints. Use another prefix. Or, if that database does not exist any more, delete "
            f"{OWNER!r} in the store; then its checkpoints are deleted"
        )
    if marked_home != home:
        raise ConfigError(
            f"checkpoint_store: {url} is used with another copy of this database ({marked_home}; this one is {home}). "
            "Two copies would delete each other's newer checkpoints. To try a backup, give it a copy of the store "
            f"under another URL. Or, if the other copy does not exist any more, delete {OWNER!r} in the store"
        )


def _place(connection: Connection) -> str:
    """A name for the database in its PostgreSQL cluster. It is the same for all servers on the database. A database
    that was restored from a dump has another one."""
    query = """
        SELECT CASE WHEN has_function_privilege('pg_control_system()', 'execute')
                    THEN (SELECT system_identifier FROM pg_control_system()) END, oid
        FROM pg_database WHERE datname = current_database()
    """
    cluster, number = connection.execute(text(query)).one()
    return f"postgresql-{cluster or 'unknown'}-{number}"
