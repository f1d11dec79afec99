"""one copy for each idempotency key; active sessions by tenant

Revision: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

checkpoints = sa.table("checkpoints", sa.column("id", sa.Integer), sa.column("copy_key", sa.String))


def upgrade() -> None:
    # Before this revision, two API processes could make two copies under one key. The first one keeps the key, so that
    # a repeated request is answered with it. The others stay as checkpoints that no key finds.
    first = sa.select(sa.func.min(checkpoints.c.id)).where(checkpoints.c.copy_key.is_not(None))
    later = checkpoints.c.copy_key.is_not(None) & checkpoints.c.id.not_in(first.group_by(checkpoints.c.copy_key))
    op.get_bind().execute(sa.update(checkpoints).where(later).values(copy_key=None))
    op.drop_index(op.f("ix_checkpoints_copy_key"), "checkpoints")
    op.create_index(op.f("ix_checkpoints_copy_key"), "checkpoints", ["copy_key"], unique=True)
    active = sa.text("status = 'active'")
    op.create_index("ix_sessions_active_tenant", "sessions", ["tenant"], sqlite_where=active, postgresql_where=active)


def downgrade() -> None:
    op.drop_index("ix_sessions_active_tenant", "sessions")
    op.drop_index(op.f("ix_checkpoints_copy_key"), "checkpoints")
    op.create_index(op.f("ix_checkpoints_copy_key"), "checkpoints", ["copy_key"], unique=False)
