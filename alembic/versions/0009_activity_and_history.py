"""what the engine does now; the history of each run's steps; usage by run

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

KEY = ("tenant", "bucket", "session_id", "base_model", "kind")


def upgrade() -> None:
    op.add_column("engine_state", sa.Column("activity", sa.Text(), nullable=True))
    op.add_column("models", sa.Column("steps", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "run_steps",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("passes", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("loss_sum", sa.Float(), nullable=False),
        sa.Column("loss_tokens", sa.BigInteger(), nullable=False),
        sa.Column("gap_sum", sa.Float(), nullable=False),
        sa.Column("gap_tokens", sa.BigInteger(), nullable=False),
        sa.Column("clipped_sum", sa.Float(), nullable=False),
        sa.Column("clipped_tokens", sa.BigInteger(), nullable=False),
        sa.Column("busy_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "step"),
    )
    op.create_index("ix_run_steps_updated_at", "run_steps", ["updated_at"])
    rebuild_usage(run=True)


def downgrade() -> None:
    rebuild_usage(run=False)
    op.drop_table("run_steps")
    op.drop_column("models", "steps")
    op.drop_column("engine_state", "activity")


def rebuild_usage(*, run: bool) -> None:
    """Add the column of the run to the table's key, or take it out and add up what it kept apart. SQLite cannot change
    a primary key."""
    key = (*KEY[:3], "model_id", *KEY[3:]) if run else KEY
    op.drop_index("ix_usage_bucket", "usage")
    op.rename_table("usage", "old_usage")
    op.create_table(
        "usage",
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.String(), nullable=False) for name in key if name != "bucket"),
        sa.Column("amount", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint(*key, name=f"pk_usage_{'run' if run else 'session'}"),
    )
    columns = ", ".join(KEY)
    if run:
        copy = f"INSERT INTO usage ({columns}, model_id, amount) SELECT {columns}, '', amount FROM old_usage"
    else:
        copy = f"INSERT INTO usage ({columns}, amount) SELECT {columns}, SUM(amount) FROM old_usage GROUP BY {columns}"
    op.execute(copy)
    op.drop_table("old_usage")
    op.create_index("ix_usage_bucket", "usage", ["bucket"])
