"""Sampling sessions: the durable side of which client samples from which adapter version."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from skyrl.db import adapter_versions, audit
from skyrl.db.adapter_versions import SamplerDropped, samplers
from skyrl.db.database import Database
from skyrl.db.tables import SessionRow
from skyrl.db.writer import GroupCommitWriter

sessions = SessionRow.__table__  # type: ignore[attr-defined]

LEARN_BACK_S = 600.0
"""How far back one looks for dropped versions: the engine that dropped them has another clock, perhaps."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session samples from. No adapter: the base model itself. `adapter_path` is relative to the state
    directory."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    model_path: str | None
    adapter_name: str | None
    adapter_path: str | None


def sampler_values(sampler: Sampler, seq_id: int, size_bytes: int | None = None) -> dict[str, Any]:
    """A row for `samplers`. `size_bytes` is what the adapter's files take."""
    now = time.time()
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
        "created_at": now,
        "size_bytes": size_bytes,
        "last_used_at": None if sampler.adapter_name is None else now,
    }


def sampler_exists(connection: Connection, sampling_session_id: str) -> bool:
    """Whether there is such a sampling session, open or not."""
    return connection.execute(select(samplers.c.id).where(samplers.c.id == sampling_session_id)).first() is not None


def find_sampler(connection: Connection, sampling_session_id: str) -> Sampler | None:
    """An open sampling session. Raises SamplerDropped when its adapter has been deleted."""
    row = connection.execute(select(samplers).where(samplers.c.id == sampling_session_id)).first()
    if row is None or row.status == "closed":
        return None
    if row.status == "dropped":
        raise SamplerDropped(sampling_session_id)
    return Sampler(
        row.id, row.session_id, row.tenant, row.base_model, row.model_path, row.adapter_name, row.adapter_path
    )


def add_sampler(connection: Connection, sampler: Sampler, seq_id: int, size_bytes: int | None = None) -> bool:
    """Insert unless it is there (a repeated request); whether it was not."""
    new = not sampler_exists(connection, sampler.id)
    if new:
        connection.execute(insert(samplers), sampler_values(sampler, seq_id, size_bytes))
    return new


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


def _found(connection: Connection, sampling_session_id: str, tenant: str) -> tuple[Sampler | None, bool]:
    """A tenant's open sampling session, and whether the session it is in is active."""
    owner = connection.execute(select(samplers.c.tenant).where(samplers.c.id == sampling_session_id)).scalar()
    sampler = find_sampler(connection, sampling_session_id) if owner == tenant else None
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
        self._used: set[str] = set()
        """Ids of those that were sampled from since this was last written."""

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
            if not sampler_exists(connection, sampler.id):
                if check is not None:
                    check(connection)
                add_sampler(connection, sampler, seq_id, None if saved is None else saved.size_bytes)
                if saved is not None:
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
        """The tenant's open sampling session. Raises SamplerDropped when its adapter has been deleted."""
        stored = self._known.get(sampling_session_id)
        if stored is None:
            stored, living = await self._database.read_async(lambda c: _found(c, sampling_session_id, tenant))
            if stored is not None and living:  # one whose session has ended is not forgotten again
                self._known[sampling_session_id] = stored
        return stored if stored is not None and stored.tenant == tenant else None

    def forget_session(self, session_id: str) -> None:
        for sampler in [s for s in self._known.values() if s.session_id == session_id]:
            del self._known[sampler.id]

    def note_use(self, sampler: Sampler) -> None:
        """Somebody samples from it. Written by `write_uses`, so that a sample writes nothing more."""
        if sampler.adapter_name is not None:
            self._used.add(sampler.id)

    async def write_uses(self) -> None:
        """Write which sampling sessions were used, all in one transaction. To be called every minute or so."""
        used, self._used = self._used, set()
        if not used:
            return
        now = time.time()
        try:
            await self._writer.transact(lambda c: adapter_versions.note_uses(c, used, now))
        except BaseException:
            self._used |= used
            raise

    async def forget_dropped(self) -> None:
        """Find out whose adapters have been dropped: samples from them are refused from now on. To be called several
        times in NOTICE_S."""
        since = time.time() - LEARN_BACK_S
        for sampler_id in await self._database.read_async(lambda c: adapter_versions.dropped_since(c, since)):
            self._known.pop(sampler_id, None)

    async def is_dropped(self, sampler: Sampler) -> bool:
        """Whether its adapter has been dropped, as the database says."""
        query = select(samplers.c.status).where(samplers.c.id == sampler.id)
        return await self._database.read_async(lambda c: c.execute(query).scalar()) == "dropped"
