"""rows of the engine's state and of sample clocks for each base model; the claim in a table of its own

Revision: 0016
Revises: 0015
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

KEPT = (
    "inference_proxy_url, generation, training_ready, reason, vocab_size, max_context, heartbeat_at, updated_at, "
    "state_dir, activity"
)


def _state(*key: sa.Column) -> list[sa.Column]:
    return [
        *key,
        sa.Column("inference_proxy_url", sa.String(), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("training_ready", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=True),
        sa.Column("max_context", sa.Integer(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("state_dir", sa.String(), nullable=True),
        sa.Column("activity", sa.Text(), nullable=True),
    ]


def upgrade() -> None:
    op.create_table(
        "training_claim",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("held_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute("INSERT INTO training_claim (id, owner, held_at) SELECT id, owner, held_at FROM engine_state")
    op.create_table(
        "engine_states",
        *_state(sa.Column("base_model", sa.String(), nullable=False)),
        sa.PrimaryKeyConstraint("base_model"),
    )
    op.execute(f"INSERT INTO engine_states (base_model, {KEPT}) SELECT '', {KEPT} FROM engine_state")
    op.drop_table("engine_state")
    op.rename_table("engine_states", "engine_state")
    op.create_table(
        "sample_clocks",
        sa.Column("process_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("clock", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("process_id", "base_model"),
    )
    op.drop_column("api_processes", "sample_clock")


def downgrade() -> None:
    op.add_column("api_processes", sa.Column("sample_clock", sa.BigInteger(), nullable=True))
    op.drop_table("sample_clocks")
    op.create_table(
        "engine_states",
        *_state(sa.Column("id", sa.Integer(), nullable=False)),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("held_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute(f"INSERT INTO engine_states (id, {KEPT}) SELECT 1, {KEPT} FROM engine_state WHERE base_model = ''")
    op.execute(
        "UPDATE engine_states SET owner = (SELECT owner FROM training_claim WHERE id = 1), "
        "held_at = (SELECT held_at FROM training_claim WHERE id = 1)"
    )
    op.drop_table("engine_state")
    op.rename_table("engine_states", "engine_state")
    op.drop_table("training_claim")
