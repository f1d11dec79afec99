"""uses of adapter versions by requests that have no row of their own

Revision: 0010
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_uses",
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("used_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("weights"),
    )


def downgrade() -> None:
    op.drop_table("adapter_uses")
