"""Alembic's entry: connects through skyrl's own engine factory, so that migrations see the same SQLite settings."""

from __future__ import annotations

from sqlmodel import SQLModel

from alembic import context
from skyrl.storage.db import tables  # noqa: F401  (registers the tables)
from skyrl.storage.db.database import Database


def run() -> None:
    url = context.config.get_main_option("sqlalchemy.url")
    assert url is not None
    database = Database(url)
    try:
        with database.writer.connect() as connection:
            context.configure(
                connection=connection,
                target_metadata=SQLModel.metadata,
                render_as_batch=database.is_sqlite,
                compare_type=True,
            )
            with context.begin_transaction():
                context.run_migrations()
            connection.commit()
    finally:
        database.close()


run()
