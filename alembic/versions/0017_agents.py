"""sessions of agents, and their turns

Revision: 0017
Revises: 0016
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "agent_sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("follows", sa.String(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_agent_sessions_tenant", "agent_sessions", ["tenant", "created_at"])
    op.create_index("ix_agent_sessions_open", "agent_sessions", ["tenant"], sqlite_where=OPEN, postgresql_where=OPEN)
    op.create_index("ix_agent_sessions_ended_at", "agent_sessions", ["ended_at"])
    op.create_table(
        "agent_turns",
        sa.Column("n", NUMBER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("parent", sa.String(), nullable=True),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("added", sa.Integer(), nullable=False),
        sa.Column("sampled", sa.Integer(), nullable=False),
        sa.Column("fork", sa.String(), nullable=True),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("n"),
        sa.UniqueConstraint("session_id", "key", "attempt"),
    )
    op.create_index("ix_agent_turns_session_id", "agent_turns", ["session_id"])


def downgrade() -> None:
    op.drop_table("agent_turns")
    op.drop_table("agent_sessions")
