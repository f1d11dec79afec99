"""Copies of checkpoints: rows of a model that is not trained, in a session that is there or that is made for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, insert, select

from skyrl.db import audit, usage
from skyrl.db.checkpoints import checkpoints
from skyrl.db.database import Database
from skyrl.db.models import adapter_of, models
from skyrl.db.sessions import sessions
from skyrl.db.writer import GroupCommitWriter
from skyrl.wire.paths import TinkerPath, adapter_name_of


@dataclass(frozen=True)
class Copy:
    """Where a copy goes. With `project_id`, its session is made too, as one that has ended. `adapter_directory` is
    where vLLM will read it, relative to the state directory; `copy_key` is the request's, None for one that cannot be
    repeated."""

    path: TinkerPath
    tenant: str
    session_id: str
    model_seq_id: int
    store_key: str
    adapter_directory: str
    project_id: str | None = None
    expires_at: float | None = None
    copy_key: str | None = None


class Recorded(NamedTuple):
    """What became of a copy. `path` is the recorded copy, this one or the one that was there; None: the model's number
    is another's. `new` says that this one was recorded; otherwise nobody needs its files."""

    path: TinkerPath | None
    new: bool


class Copies:
    """Finds what a request has copied before; records what has been copied."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def made_by(self, copy_key: str) -> TinkerPath | None:
        """The copy that a request with this key has made, unless it is gone."""
        return await self._database.read_async(lambda connection: _made_by(connection, copy_key))

    async def add(self, copy: Copy, source: Any, check: Callable[[Connection], None] | None = None) -> Recorded:
        """Record that the files of `source` (a checkpoints row) are stored again, in one transaction with all it needs.

        Nothing is recorded if a request with the same key has made a copy already, in whichever API process, or if the
        model exists. Raises what `check` raises."""
        now = time.time()
        path = copy.path
        model = {
            "id": path.model_id,
            "session_id": copy.session_id,
            "tenant": copy.tenant,
            "model_seq_id": copy.model_seq_id,
            "base_model": source.base_model,
            "status": "closed",
            **asdict(adapter_of(source)),
            "user_metadata": None,
            "sampler_version": 1,
            "next_seq": 0,
            "created_at": now,
            "last_request_at": now,
        }
        samples = path.kind == "sampler_weights"
        checkpoint = {
            "tenant": copy.tenant,
            "model_id": path.model_id,
            "kind": path.kind,
            "name": path.name,
            "store_key": copy.store_key,
            "directory": copy.adapter_directory if samples else None,
            "adapter_name": adapter_name_of(path.model_id, 1) if samples else None,
            "copy_key": copy.copy_key,
            "base_model": source.base_model,
            **asdict(adapter_of(source)),
            "size_bytes": source.size_bytes,
            "public": False,
            "user_metadata": source.user_metadata,
            "created_at": now,
            "expires_at": copy.expires_at,
        }
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
        source_path = str(TinkerPath(source.model_id, source.kind, source.name))

        def add(connection: Connection) -> Recorded:
            # Write transactions run one by one, so no other process can add a copy between this look-up and the insert.
            if copy.copy_key is not None and (made := _made_by(connection, copy.copy_key)) is not None:
                return Recorded(made, new=False)
            if connection.execute(select(models.c.id).where(models.c.id == path.model_id)).first() is not None:
                return Recorded(None, new=False)
            if check is not None:
                check(connection)
            if copy.project_id is not None:
                connection.execute(insert(sessions), session)
            connection.execute(insert(models), model)
            connection.execute(insert(checkpoints), checkpoint)
            usage.count_checkpoint(connection, copy.tenant, copy.session_id, source.base_model)
            for tenant in sorted({copy.tenant, source.tenant}):
                audit.record(
                    connection,
                    tenant,
                    "checkpoint_copied",
                    tinker_path=str(path),
                    model_id=path.model_id,
                    source_path=source_path,
                )
            return Recorded(path, new=True)

        return await self._writer.transact(add)


def _made_by(connection: Connection, copy_key: str) -> TinkerPath | None:
    row = connection.execute(select(checkpoints).where(checkpoints.c.copy_key == copy_key)).first()
    return None if row is None else TinkerPath(row.model_id, row.kind, row.name)
