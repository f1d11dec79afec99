"""the tenant in the index by which pictures are summed: each tenant has a share of them

Revision: 0025
Revises: 0024
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_pictures_last_used_at", "pictures")
    op.create_index("ix_pictures_last_used_at", "pictures", ["last_used_at", "size_bytes", "tenant"])
