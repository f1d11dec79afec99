"""Sampling sessions: the durable side of which client samples from which adapter version."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from skyrl.db import audit
from skyrl.db.database import Database
from skyrl.db.tables import FutureRow, SamplingSessionRow, SessionRow
from skyrl.db.writer import GroupCommitWriter

samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]
futures = FutureRow.__table__  # type: ignore[attr-defined]
sessions = SessionRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session samples from. No adapter: the base model itself."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    model_path: str | None
    adapter_name: str | None
    adapter_path: str | None


def sampler_values(sampler: Sampler, seq_id: int) -> dict[str, Any]:
    """A row for `samplers`."""
    return {
        "id": sampler.id,
        "session_id": sampler.session_id,
        "tenant": sampler.tenant,
        "seq_id": seq_id,
        "base_model": sampler.base_model,
        "model_path": sampler.model_path,
        "adapter_name": sampler.adapter_name,
        "adapter_path": sampler.adapter_path,
        "status": "active",
        "created_at": time.time(),
    }


def find_sampler(connection: Connection, sampling_session_id: str) -> Sampler | None:
    row = connection.execute(
        select(samplers).where(samplers.c.id == sampling_session_id, samplers.c.status == "active")
    ).first()
    if row is None:
        return None
    return Sampler(
        row.id, row.session_id, row.tenant, row.base_model, row.model_path, row.adapter_name, row.adapter_path
    )


def add_sampler(connection: Connection, sampler: Sampler, seq_id: int) -> bool:
    """Insert unless it is there (a repeated request); whether it was not."""
    new = connection.execute(select(samplers.c.id).where(samplers.c.id == sampler.id)).first() is None
    if new:
        connection.execute(insert(samplers), sampler_values(sampler, seq_id))
    return new


def adapter_in_use(connection: Connection, adapter_name: str) -> bool:
    """Whether a living sampling session can reach this adapter version, or a sample on it is still running."""
    living = select(samplers.c.id).where(samplers.c.adapter_name == adapter_name, samplers.c.status == "active")
    if connection.execute(living.limit(1)).first() is not None:
        return True
    running = (
        select(futures.c.id)
        .join(samplers, samplers.c.id == futures.c.sampling_session_id)
        .where(samplers.c.adapter_name == adapter_name, futures.c.status == "pending")
    )
    return connection.execute(running.limit(1)).first() is not None


def _record_use(connection: Connection, sampler: Sampler, saved: Any) -> None:
    details = {
        "tinker_path": sampler.model_path,
        "model_id": saved.model_id,
        "session_id": sampler.session_id,
        "sampling_session_id": sampler.id,
    }
    if saved.tenant != sampler.tenant:
        details["reader"] = sampler.tenant
    audit.record(connection, saved.tenant, "checkpoint_sampled", **details)


def _found(connection: Connection, sampling_session_id: str) -> tuple[Sampler | None, bool]:
    """An open sampling session, and whether the session it is in is active."""
    sampler = find_sampler(connection, sampling_session_id)
    if sampler is None:
        return None, False
    status = connection.execute(select(sessions.c.status).where(sessions.c.id == sampler.session_id)).scalar()
    return sampler, status == "active"


class Samplers:
    """Sampling sessions, cached in memory: resolving one on the way of a sample reads no database."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._known: dict[str, Sampler] = {}

    async def create(
        self,
        sampler: Sampler,
        seq_id: int,
        saved: Any | None = None,
        check: Callable[[Connection], None] | None = None,
    ) -> Sampler:
        """Add it, or return what was added under this id before. `saved` is the checkpoint's row it samples from.
        Raises what `check` raises of a new one."""

        def add(connection: Connection) -> Sampler:
            if check is not None and find_sampler(connection, sampler.id) is None:
                check(connection)
            if add_sampler(connection, sampler, seq_id) and saved is not None:
                _record_use(connection, sampler, saved)
            stored = find_sampler(connection, sampler.id)
            return stored if stored is not None else sampler

        stored = await self._writer.transact(add)
        self._known[stored.id] = stored
        return stored

    async def join(self, sampler: Sampler) -> int:
        """A number for one more copy of a sampling client: 1, 2, 3… for each sampling session, and never one again."""

        def count(connection: Connection) -> int:
            mine = samplers.c.id == sampler.id
            connection.execute(update(samplers).where(mine).values(clones=samplers.c.clones + 1))
            return connection.execute(select(samplers.c.clones).where(mine)).scalar_one()

        return await self._writer.transact(count)

    def cached(self, sampling_session_id: str, tenant: str) -> Sampler | None:
        sampler = self._known.get(sampling_session_id)
        return sampler if sampler is not None and sampler.tenant == tenant else None

    async def find(self, sampling_session_id: str, tenant: str) -> Sampler | None:
        """The tenant's open sampling session."""
        stored = self._known.get(sampling_session_id)
        if stored is None:
            stored, living = await self._database.read_async(lambda c: _found(c, sampling_session_id))
            if stored is not None and living:  # one whose session has ended is not forgotten again
                self._known[sampling_session_id] = stored
        return stored if stored is not None and stored.tenant == tenant else None

    def forget_session(self, session_id: str) -> None:
        for sampler in [s for s in self._known.values() if s.session_id == session_id]:
            del self._known[sampler.id]
