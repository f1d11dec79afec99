"""the loss of a step per weight, its ratio and its learning rate

Steps from before have no sum of weights, so they have no loss any more: it was divided by tokens without weight, too.

Revision: 0018
Revises: 0017
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_column("run_steps", "loss_tokens")
    op.add_column("run_steps", sa.Column("loss_weight", sa.Float(), nullable=False, server_default="0"))
    op.add_column("run_steps", sa.Column("ratio_sum", sa.Float(), nullable=False, server_default="0"))
    op.add_column("run_steps", sa.Column("ratio_tokens", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("run_steps", sa.Column("learning_rate", sa.Float(), nullable=True))


def downgrade() -> None:
    for name in ("learning_rate", "ratio_tokens", "ratio_sum", "loss_weight"):
        op.drop_column("run_steps", name)
    op.add_column("run_steps", sa.Column("loss_tokens", sa.BigInteger(), nullable=False, server_default="0"))
