"""the numbers of versions that saves have taken

Revision: 0014
Revises: 0013
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("versions_taken", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("models", "versions_taken")
