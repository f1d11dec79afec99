"""checkpoints in a store, and copies of them

Revision: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

checkpoints = sa.table(
    "checkpoints",
    sa.column("id", sa.Integer),
    sa.column("kind", sa.String),
    sa.column("directory", sa.String),
    sa.column("store_key", sa.String),
)


def upgrade() -> None:
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.add_column(sa.Column("store_key", sa.String(), nullable=True))
        batch_op.add_column(sa.Column("copy_key", sa.String(), nullable=True))
        batch_op.alter_column("directory", existing_type=sa.String(), nullable=True)
        batch_op.create_index(batch_op.f("ix_checkpoints_copy_key"), ["copy_key"], unique=False)

    # Training checkpoints lie where the store in the state directory keeps them; sampler weights are put there by the
    # engine, which knows that directory.
    connection = op.get_bind()
    weights = sa.select(checkpoints.c.id, checkpoints.c.directory).where(checkpoints.c.kind == "weights")
    for number, directory in list(connection.execute(weights)):
        key = "/".join(directory.split("/")[-2:])
        update = sa.update(checkpoints).where(checkpoints.c.id == number)
        connection.execute(update.values(store_key=key))

    op.create_table(
        "stores",
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("url"),
    )


def downgrade() -> None:
    op.drop_table("stores")
    # The version before has no store: what was saved since keeps its key for a directory, and cannot be loaded by it.
    known = sa.func.coalesce(checkpoints.c.directory, checkpoints.c.store_key, "")
    op.get_bind().execute(sa.update(checkpoints).values(directory=known))
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_checkpoints_copy_key"))
        batch_op.alter_column("directory", existing_type=sa.String(), nullable=False)
        batch_op.drop_column("copy_key")
        batch_op.drop_column("store_key")
