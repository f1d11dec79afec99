"""the trace to which a request belongs

Revision: 0011
Revises: 0010
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("futures", sa.Column("trace", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("futures", "trace")
