"""Whose a checkpoint store is. Two databases on one store would sweep each other's checkpoints as nobody's."""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, insert, select

from skyrl.config import ConfigError, ServerConfig
from skyrl.db.database import Database
from skyrl.db.tables import StoreRow
from skyrl.storage.base import OWNER, StoreError
from skyrl.storage.registry import open_store

stores = StoreRow.__table__  # type: ignore[attr-defined]


def claim_store(config: ServerConfig, database: Database) -> None:
    """Mark the configured store as this database's, or see that it is; the one in the state directory needs no mark.

    Raises ConfigError: the store cannot be used, or belongs to another database.
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
    try:
        marked = open_store(config).claim(owner)
    except StoreError as error:
        raise ConfigError(f"checkpoint_store: {error}") from error
    if marked != owner:
        raise ConfigError(
            f"checkpoint_store: {url} belongs to another server's database, whose checkpoints this one would take for "
            f"leftovers. Use another prefix; or, if that database is gone for good, delete {OWNER!r} in the store, and "
            "what it holds is swept"
        )
