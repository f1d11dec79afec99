"""indexes in the order of lists, of published checkpoints, and of keys in the checkpoint store

Revision: 0024
Revises: 0023
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table, columns in (
        ("models", ["tenant", "created_at"]),
        ("checkpoints", ["tenant", "created_at", "id"]),
    ):
        op.create_index(f"ix_{table}_tenant_created_at", table, columns)
        op.drop_index(f"ix_{table}_tenant", table)
    op.create_index(
        "ix_checkpoints_public",
        "checkpoints",
        ["created_at", "id"],
        sqlite_where=sa.text("public IS 1"),
        postgresql_where=sa.text("public IS true"),
    )
    op.create_index("ix_checkpoints_store_key", "checkpoints", ["store_key"])
