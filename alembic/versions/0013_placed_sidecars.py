"""the sidecars of inference servers on a Ray cluster

Revision: 0013
Revises: 0012
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("inference_servers", sa.Column("sidecar_url", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("inference_servers", "sidecar_url")
