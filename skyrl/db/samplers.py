"""Sampling sessions: the durable side of which client samples from which adapter version."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select

from skyrl.db.database import Database
from skyrl.db.tables import FutureRow, SamplingSessionRow
from skyrl.db.writer import GroupCommitWriter

samplers = SamplingSessionRow.__table__  # type: ignore[attr-defined]
futures = FutureRow.__table__  # type: ignore[attr-defined]


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


def add_sampler(connection: Connection, sampler: Sampler, seq_id: int) -> None:
    """Insert unless it is there (a repeated request)."""
    if connection.execute(select(samplers.c.id).where(samplers.c.id == sampler.id)).first() is None:
        connection.execute(insert(samplers), sampler_values(sampler, seq_id))


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


class Samplers:
    """Sampling sessions, cached in memory: resolving one on the way of a sample reads no database."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._known: dict[str, Sampler] = {}

    async def create(self, sampler: Sampler, seq_id: int) -> Sampler:
        """Add it, or return what was added under this id before."""

        def add(connection: Connection) -> Sampler:
            add_sampler(connection, sampler, seq_id)
            stored = find_sampler(connection, sampler.id)
            return stored if stored is not None else sampler

        stored = await self._writer.transact(add)
        self._known[stored.id] = stored
        return stored

    def cached(self, sampling_session_id: str, tenant: str) -> Sampler | None:
        sampler = self._known.get(sampling_session_id)
        return sampler if sampler is not None and sampler.tenant == tenant else None

    async def find(self, sampling_session_id: str, tenant: str) -> Sampler | None:
        """The tenant's open sampling session."""
        if sampling_session_id not in self._known:
            stored = await self._database.read_async(lambda c: find_sampler(c, sampling_session_id))
            if stored is None:
                return None
            self._known[sampling_session_id] = stored
        return self.cached(sampling_session_id, tenant)

    def forget_session(self, session_id: str) -> None:
        for sampler in [s for s in self._known.values() if s.session_id == session_id]:
            del self._known[sampler.id]
