"""every checkpoint has a key in the checkpoint store, and every adapter is in the directory that follows from its name

Version 0.2 completes the rows of earlier versions when its engine starts. A row that it could not complete gets a key
under which nothing is stored. It keeps its weights, because the files of its adapter may be in the state directory.

Revision: 0019
Revises: 0018
"""

from __future__ import annotations

import logging

import sqlalchemy as sa

from alembic import op

logger = logging.getLogger("skyrl.storage.db.migrate")

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    lost = sa.text("UPDATE checkpoints SET store_key = 'lost/' || id WHERE store_key IS NULL")
    if count := op.get_bind().execute(lost).rowcount:
        logger.warning("the checkpoint store has no files of %d checkpoints: version 0.2 could not store them", count)
    with op.batch_alter_table("checkpoints") as checkpoints:
        checkpoints.drop_column("old_directory")
        checkpoints.alter_column("store_key", existing_type=sa.String(), nullable=False)
    op.drop_column("sampling_sessions", "old_directory")
