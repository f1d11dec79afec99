"""who forwards a sample, which API processes live, what tenants may use

Revision: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("futures", sa.Column("owner", sa.String(), nullable=True))
    op.add_column("futures", sa.Column("not_before", sa.Float(), nullable=True))
    op.add_column("engine_state", sa.Column("owner", sa.String(), nullable=True))
    op.add_column("engine_state", sa.Column("held_at", sa.Float(), nullable=True))
    op.create_table(
        "api_processes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.Column("sample_clock", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("requests_in_flight", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("models", sa.Integer(), nullable=True),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant"),
    )


def downgrade() -> None:
    op.drop_table("quotas")
    op.drop_table("api_processes")
    with op.batch_alter_table("engine_state", schema=None) as batch_op:
        batch_op.drop_column("held_at")
        batch_op.drop_column("owner")
    with op.batch_alter_table("futures", schema=None) as batch_op:
        batch_op.drop_column("not_before")
        batch_op.drop_column("owner")
