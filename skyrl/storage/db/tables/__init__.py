"""The schema as SQLModel tables, one module for each domain. Times are in seconds since the epoch. Alembic's revisions
make these tables.

Whoever imports one table loads all of them: `SQLModel.metadata` is complete, and foreign keys find their tables.
"""

from skyrl.storage.db.tables import agents, checkpoints, processes, requests, sessions, tenants  # noqa: F401
