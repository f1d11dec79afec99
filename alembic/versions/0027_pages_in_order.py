"""indexes that give each list in its order, and count it without its rows

Revision: 0027
Revises: 0026
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

PUBLIC: dict[str, Any] = {"sqlite_where": sa.text("public IS 1"), "postgresql_where": sa.text("public IS true")}
_ACTIVE = sa.text("status = 'active'")
ACTIVE: dict[str, Any] = {"sqlite_where": _ACTIVE, "postgresql_where": _ACTIVE}


def upgrade() -> None:
    for name in ("ix_checkpoints_tenant_created_at", "ix_checkpoints_public"):
        op.drop_index(name, "checkpoints")
    order, shown = ["created_at", "id"], ["kind", "expires_at"]
    op.create_index("ix_checkpoints_tenant_created_at", "checkpoints", ["tenant", *order, *shown])
    # With `public`, because SQLite reads what the index is made of once more.
    op.create_index("ix_checkpoints_public", "checkpoints", [*order, "tenant", *shown, "public"], **PUBLIC)
    op.drop_index("ix_models_tenant_created_at", "models")
    op.create_index("ix_models_tenant_created_at", "models", ["tenant", "created_at", "id"])
    op.create_index("ix_models_tenant_last_request_at", "models", ["tenant", "last_request_at", "id"])
    for name in ("ix_sessions_tenant", "ix_sessions_active_tenant"):
        op.drop_index(name, "sessions")
    op.create_index("ix_sessions_tenant_created_at", "sessions", ["tenant", "created_at", "id"])
    # Last: of two indexes that serve a query equally well, SQLite takes the newer.
    op.create_index("ix_sessions_active_tenant", "sessions", ["tenant"], **ACTIVE)
