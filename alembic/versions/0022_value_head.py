"""models and checkpoints say whether the adapter has a value head

Revision: 0022
Revises: 0021
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("models", "checkpoints"):
        op.add_column(table, sa.Column("value_head", sa.Boolean(), nullable=False, server_default=sa.false()))
