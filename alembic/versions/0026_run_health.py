"""what a run's health is read from: its samples, its rewards and where the time of a step goes

Revision: 0026
Revises: 0025
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

COUNTS = ("advantage_tokens", "rewards", "samples", "truncated", "surprise_tokens", "saves")
SUMS = ("reward_sum", "surprise_sum", "sampling_s", "sampling_until", "wait_s", "save_s")


def upgrade() -> None:
    for names, kind in ((COUNTS, sa.BigInteger()), (SUMS, sa.Float())):
        for name in names:
            op.add_column("run_steps", sa.Column(name, kind, server_default="0", nullable=False))
    op.add_column("run_steps", sa.Column("wall_s", sa.Float(), nullable=True))
