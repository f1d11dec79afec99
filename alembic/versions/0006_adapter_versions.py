"""sizes and last uses of adapter versions; paths relative to the state directory; indexes of open sampling sessions

Revision: 0006
Revises: 0005
"""

from __future__ import annotations

import re
import time

import sqlalchemy as sa

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

samplers = sa.table(
    "sampling_sessions",
    sa.column("id", sa.String),
    sa.column("status", sa.String),
    sa.column("adapter_name", sa.String),
    sa.column("adapter_path", sa.String),
    sa.column("last_used_at", sa.Float),
    sa.column("closed_at", sa.Float),
)
checkpoints = sa.table("checkpoints", sa.column("id", sa.Integer), sa.column("directory", sa.String))

ADAPTER = re.compile(r"/(?:.*/)?(adapters/[^/]+/v\d+)")
"""An absolute path below some state directory. The migration does not know which one, and need not."""
OPEN, OPEN_ADAPTER = sa.text("status = 'active'"), sa.text("status = 'active' AND adapter_name IS NOT NULL")
CLOSED = sa.text("closed_at IS NOT NULL")
ROWS = 1000


def upgrade() -> None:
    op.add_column("sampling_sessions", sa.Column("size_bytes", sa.BigInteger(), nullable=True))
    op.add_column("sampling_sessions", sa.Column("last_used_at", sa.Float(), nullable=True))
    op.add_column("sampling_sessions", sa.Column("closed_at", sa.Float(), nullable=True))
    op.add_column("engine_state", sa.Column("state_dir", sa.String(), nullable=True))

    connection, now = op.get_bind(), time.time()
    # When an adapter was last sampled from is not known: its idle time begins now. The engine measures the sizes.
    is_open = samplers.c.status == "active"
    used = sa.update(samplers).where(is_open, samplers.c.adapter_name.is_not(None)).values(last_used_at=now)
    connection.execute(used)
    connection.execute(sa.update(samplers).where(~is_open).values(closed_at=now))
    make_relative(connection, samplers, samplers.c.adapter_path)
    make_relative(connection, checkpoints, checkpoints.c.directory)

    op.create_index(
        "ix_sampling_sessions_open", "sampling_sessions", ["session_id"], sqlite_where=OPEN, postgresql_where=OPEN
    )
    op.create_index(
        "ix_sampling_sessions_idle",
        "sampling_sessions",
        ["last_used_at", "adapter_name"],
        sqlite_where=OPEN_ADAPTER,
        postgresql_where=OPEN_ADAPTER,
    )
    op.create_index(
        "ix_sampling_sessions_closed_at",
        "sampling_sessions",
        ["closed_at"],
        sqlite_where=CLOSED,
        postgresql_where=CLOSED,
    )


def make_relative(connection: sa.Connection, table: sa.TableClause, column: sa.ColumnClause[str]) -> None:
    """Cut what is above `adapters/` off the paths of adapters. Other paths stay; the engine tells of them."""
    rows = connection.execute(sa.select(table.c.id, column).where(column.like("/%"))).all()
    found = [(row[0], ADAPTER.fullmatch(row[1])) for row in rows]
    changed = [{"row": number, "relative": match[1]} for number, match in found if match is not None]
    update = sa.update(table).where(table.c.id == sa.bindparam("row")).values({column: sa.bindparam("relative")})
    for start in range(0, len(changed), ROWS):
        connection.execute(update, changed[start : start + ROWS])


def downgrade() -> None:
    # The version before reads paths as absolute ones, and finds no adapter until its files are saved anew.
    op.get_bind().execute(sa.update(samplers).where(samplers.c.status == "dropped").values(status="closed"))
    op.drop_index("ix_sampling_sessions_closed_at", "sampling_sessions")
    op.drop_index("ix_sampling_sessions_idle", "sampling_sessions")
    op.drop_index("ix_sampling_sessions_open", "sampling_sessions")
    op.drop_column("engine_state", "state_dir")
    op.drop_column("sampling_sessions", "closed_at")
    op.drop_column("sampling_sessions", "last_used_at")
    op.drop_column("sampling_sessions", "size_bytes")
