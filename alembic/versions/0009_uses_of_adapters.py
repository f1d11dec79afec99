"""uses of adapter versions by requests that have no row of their own

Revision: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0009"
down_revision = "0008"
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
