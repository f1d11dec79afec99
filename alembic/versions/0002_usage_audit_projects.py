"""usage and audit; projects, names and ends of sessions; copies of sampling clients

Revision: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not in batch mode, which makes a table anew on SQLite: others refer to sessions, whose old table could not go.
    op.add_column("sessions", sa.Column("project_id", sa.String(), nullable=True))
    op.add_column("sessions", sa.Column("display_name", sa.String(), nullable=True))
    op.add_column("sessions", sa.Column("ended_at", sa.Float(), nullable=True))
    op.add_column("sampling_sessions", sa.Column("clones", sa.Integer(), nullable=False, server_default="0"))

    op.create_table(
        "usage",
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "bucket", "session_id", "base_model", "kind"),
    )
    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.create_index("ix_usage_bucket", ["bucket"], unique=False)

    op.create_table(
        "meters",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("counted_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "audit_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("audit_events", schema=None) as batch_op:
        batch_op.create_index("ix_audit_events_tenant_at", ["tenant", "at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("audit_events", schema=None) as batch_op:
        batch_op.drop_index("ix_audit_events_tenant_at")

    op.drop_table("audit_events")
    op.drop_table("meters")
    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.drop_index("ix_usage_bucket")

    op.drop_table("usage")
    op.drop_column("sampling_sessions", "clones")
    op.drop_column("sessions", "ended_at")
    op.drop_column("sessions", "display_name")
    op.drop_column("sessions", "project_id")
