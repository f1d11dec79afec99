"""models and checkpoints have the ranks of layers whose rank is not the adapter's

A list of pairs, a regular expression and a rank, in their order. NULL: all layers have the adapter's rank.

Revision: 0021
Revises: 0020
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("models", "checkpoints"):
        op.add_column(table, sa.Column("rank_pattern", sa.JSON(), nullable=True))
