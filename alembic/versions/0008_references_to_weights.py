"""references to weights in place of names and paths of adapters

Revision: 0008
Revises: 0007
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

samplers = sa.table(
    "sampling_sessions",
    sa.column("id", sa.String),
    sa.column("status", sa.String),
    sa.column("adapter_name", sa.String),
    sa.column("adapter_path", sa.String),
    sa.column("weights", sa.Text),
    sa.column("old_directory", sa.String),
    sa.column("created_at", sa.Float),
    sa.column("closed_at", sa.Float),
)
checkpoints = sa.table(
    "checkpoints",
    sa.column("id", sa.Integer),
    sa.column("adapter_name", sa.String),
    sa.column("directory", sa.String),
    sa.column("weights", sa.Text),
    sa.column("old_directory", sa.String),
)
PATHS = ((samplers, samplers.c.adapter_path), (checkpoints, checkpoints.c.directory))
"""Both tables, and the column of each that held the place of the files until now."""

OPEN_NAME = sa.text("status = 'active' AND adapter_name IS NOT NULL")
OPEN_WEIGHTS = sa.text("status = 'active' AND weights <> 'base'")
ROWS = 1000


def location(name: str | None) -> str | None:
    """Where the files of an adapter version lie, relative to the state directory; None for a name that is not
    `<model>@<number>`."""
    model_id, _, number = (name or "").rpartition("@")
    if not model_id or not number.isdecimal():
        return None
    return f"adapters/{quote(model_id, safe='').replace('%', '=')}/v{int(number):06d}"


def upgrade() -> None:
    connection = op.get_bind()
    op.add_column("sampling_sessions", sa.Column("weights", sa.Text(), server_default="base", nullable=False))
    op.add_column("checkpoints", sa.Column("weights", sa.Text(), nullable=True))
    for table, path in PATHS:
        op.add_column(table.name, sa.Column("old_directory", sa.String(), nullable=True))
        named = table.c.adapter_name.is_not(None)
        connection.execute(sa.update(table).where(named).values(weights="adapter:" + table.c.adapter_name))
        keep_unusual(connection, table, path)

    op.drop_index("ix_sampling_sessions_idle", "sampling_sessions")
    for table, path in PATHS:
        op.drop_index(f"ix_{table.name}_adapter_name", table.name)
        op.drop_column(table.name, "adapter_name")
        op.drop_column(table.name, path.name)
        op.create_index(f"ix_{table.name}_weights", table.name, ["weights"], unique=False)
    op.create_index(
        "ix_sampling_sessions_idle",
        "sampling_sessions",
        ["last_used_at", "weights"],
        sqlite_where=OPEN_WEIGHTS,
        postgresql_where=OPEN_WEIGHTS,
    )


def keep_unusual(connection: sa.Connection, table: sa.TableClause, path: sa.ColumnClause[str]) -> None:
    """The place of the files follows from the version's name. Keep each path that is another one."""
    rows = connection.execute(sa.select(table.c.id, table.c.adapter_name, path).where(path.is_not(None)))
    unusual = [{"row": row, "path": found} for row, name, found in rows if found != location(name)]
    keep = sa.update(table).where(table.c.id == sa.bindparam("row")).values(old_directory=sa.bindparam("path"))
    in_parts(connection, keep, unusual)


def in_parts(connection: sa.Connection, statement: sa.Executable, values: list[dict[str, Any]]) -> None:
    for start in range(0, len(values), ROWS):
        connection.execute(statement, values[start : start + ROWS])


def downgrade() -> None:
    connection = op.get_bind()
    # The version before knows no full weights, and would sample from the base model instead.
    full = samplers.c.weights.like("full:%")
    connection.execute(sa.update(samplers).where(full).values(status="closed", closed_at=samplers.c.created_at))
    op.drop_index("ix_sampling_sessions_idle", "sampling_sessions")
    for table, path in PATHS:
        op.drop_index(f"ix_{table.name}_weights", table.name)
        op.add_column(table.name, sa.Column("adapter_name", sa.String(), nullable=True))
        op.add_column(table.name, sa.Column(path.name, sa.String(), nullable=True))
        connection.execute(sa.update(table).values({path: table.c.old_directory}))
        restore_names(connection, table, path)
        op.drop_column(table.name, "weights")
        op.drop_column(table.name, "old_directory")
        op.create_index(f"ix_{table.name}_adapter_name", table.name, ["adapter_name"], unique=False)
    op.create_index(
        "ix_sampling_sessions_idle",
        "sampling_sessions",
        ["last_used_at", "adapter_name"],
        sqlite_where=OPEN_NAME,
        postgresql_where=OPEN_NAME,
    )


def restore_names(connection: sa.Connection, table: sa.TableClause, path: sa.ColumnClause[str]) -> None:
    rows = connection.execute(sa.select(table.c.id, table.c.weights).where(table.c.weights.like("adapter:%")))
    names = [(row, weights.removeprefix("adapter:")) for row, weights in rows]
    restore = sa.update(table).where(table.c.id == sa.bindparam("row"))
    usual = sa.func.coalesce(table.c.old_directory, sa.bindparam("path", type_=sa.String()))
    restore = restore.values({"adapter_name": sa.bindparam("name"), path.name: usual})
    in_parts(connection, restore, [{"row": row, "name": name, "path": location(name)} for row, name in names])
