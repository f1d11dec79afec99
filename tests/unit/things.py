"""A small table, and the statement that adds a row to it without SQLAlchemy, for tests of the group-commit writer."""

from __future__ import annotations

from sqlalchemy import Column, Integer, MetaData, String, Table, select

from skyrl.storage.db.database import Database
from skyrl.storage.db.row_statements import RowStatement, marks

things = Table("things", MetaData(), Column("id", Integer, primary_key=True), Column("name", String, nullable=False))
ROW = RowStatement(
    ("id", "name"),
    sqlite="INSERT INTO things (id, name) SELECT id, name FROM given WHERE id IS NOT NULL",
    postgres=f"INSERT INTO things (id, name) VALUES ({marks(('id', 'name'))})",
    long=("name",),
)


def ids(database: Database) -> list[int]:
    return database.read(lambda c: list(c.execute(select(things.c.id).order_by(things.c.id)).scalars()))
