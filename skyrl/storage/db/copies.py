"""Copies of checkpoints. A copy belongs to a model that is not in training. Its session may be made for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlalchemy import Connection, insert, select

from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.paths import TinkerPath
from skyrl.storage.db import audit, usage
from skyrl.storage.db.checkpoints import Checkpoint, checkpoint_of, checkpoints, put
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import Model, find_model, model_values, models
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.writer import GroupCommitWriter


@dataclass(frozen=True)
class Copy:
    """The copy to make. With `project_id`, an ended session is made for it, too. `copy_key` is derived from the
    request's idempotency key; None if the request has none."""

    path: TinkerPath
    tenant: str
    session_id: str
    model_seq_id: int
    store_key: str
    project_id: str | None = None
    expires_at: float | None = None
    copy_key: str | None = None


class Recorded(NamedTuple):
    """The result of `Copies.add`. `path` is the recorded copy: this one, or the copy that an earlier try has recorded.
    It is None when a model with the id exists already. If `new` is False, the files of this copy are not needed."""

    path: TinkerPath | None
    new: bool


class Copies:
    """Finds and records copies."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def made_by(self, copy_key: str) -> TinkerPath | None:
        """The copy that a request with this key has made, if it still exists."""
        return await self._database.read_async(lambda connection: _made_by(connection, copy_key))

    async def add(self, copy: Copy, source: Checkpoint, check: Callable[[Connection], None] | None = None) -> Recorded:
        """Record a copy of `source` whose files are stored, with all rows that it needs, in one transaction.

        Nothing is recorded if a request with the same key has made a copy already, in any API process, or if the model
        exists. Raises what `check` raises."""
        now = time.time()
        path = copy.path
        model = Model(path.model_id, copy.session_id, copy.tenant, source.base_model, source.lora, user_metadata=None)
        checkpoint = replace(
            source,
            path=path,
            tenant=copy.tenant,
            store_key=copy.store_key,
            weights=AdapterVersion.of(path.model_id, 1) if isinstance(source.weights, AdapterVersion) else None,
            public=False,
            created_at=now,
            expires_at=copy.expires_at,
        )
        session = {
            "id": copy.session_id,
            "tenant": copy.tenant,
            "status": "finished",
            "created_at": now,
            "heartbeat_at": now,
            "ended_at": now,
            "sdk_version": "",
            "tags": ["copy_weights"],
            "project_id": copy.project_id,
        }

        def add(connection: Connection) -> Recorded:
            # Write transactions run one at a time: no other process can add a copy between this look-up and the insert.
            if copy.copy_key is not None and (made := _made_by(connection, copy.copy_key)) is not None:
                return Recorded(made, new=False)
            if find_model(connection, path.model_id) is not None:
                return Recorded(None, new=False)
            if check is not None:
                check(connection)
            if copy.project_id is not None:
                connection.execute(insert(sessions), session)
            connection.execute(insert(models), model_values(model, copy.model_seq_id, "closed", sampler_version=1))
            put(connection, checkpoint, copy.copy_key)
            usage.count_checkpoint(connection, copy.tenant, copy.session_id, path.model_id, source.base_model)
            for tenant in sorted({copy.tenant, source.tenant}):
                audit.record(
                    connection,
                    tenant,
                    "checkpoint_copied",
                    tinker_path=str(path),
                    model_id=path.model_id,
                    source_path=str(source.path),
                )
            return Recorded(path, new=True)

        return await self._writer.transact(add)


def _made_by(connection: Connection, copy_key: str) -> TinkerPath | None:
    row = connection.execute(select(checkpoints).where(checkpoints.c.copy_key == copy_key)).first()
    return None if row is None else checkpoint_of(row).path
