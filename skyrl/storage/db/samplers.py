"""Sampling sessions: their rows, which say what each sampling client samples from, and a cache of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from skyrl.base.types.weights import EVERYTHING, BaseWeights, FullWeights, Scope, WeightsRef
from skyrl.storage.db import adapter_versions, audit, full_weights
from skyrl.storage.db.adapter_versions import SamplerDropped, samplers
from skyrl.storage.db.checkpoints import Checkpoint
from skyrl.storage.db.columns import record_of
from skyrl.storage.db.database import Database
from skyrl.storage.db.full_weights import WeightsReplaced, replaced_sentence
from skyrl.storage.db.row_caches import SessionCache
from skyrl.storage.db.tables import SessionRow
from skyrl.storage.db.writer import GroupCommitWriter

sessions = SessionRow.__table__  # type: ignore[attr-defined]

LEARN_BACK_S = 600.0
"""How far back `forget_dropped` looks. The engine writes the time of a drop, and its clock may differ from this one."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session samples from. `model_path` is the checkpoint that the client named, if it named one."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    model_path: str | None
    weights: WeightsRef


def sampler_exists(connection: Connection, sampling_session_id: str) -> bool:
    """Whether there is such a sampling session, open or not."""
    return connection.execute(select(samplers.c.id).where(samplers.c.id == sampling_session_id)).first() is not None


ScopeOf = Callable[[str], Scope]
"""The names of a base model (`skyrl.base.config.base_models.BaseModelSlot.own`), by one of them."""


def _everything(_: str) -> Scope:
    return EVERYTHING


def find_sampler(connection: Connection, sampling_session_id: str, scope_of: ScopeOf = _everything) -> Sampler | None:
    """An open sampling session. Raises SamplerDropped when its adapter has been deleted, WeightsReplaced when its full
    weights were replaced."""
    row = connection.execute(select(samplers).where(samplers.c.id == sampling_session_id)).first()
    if row is None or row.status == "closed":
        return None
    if row.status == "dropped":
        if isinstance(row.weights, FullWeights):
            now = full_weights.current(connection, scope_of(row.base_model))
            raise WeightsReplaced(replaced_sentence(row.weights, now), field="sampling_session_id")
        raise SamplerDropped(sampling_session_id)
    return record_of(Sampler, row)


def add_sampler(connection: Connection, sampler: Sampler, seq_id: int, size_bytes: int | None = None) -> bool:
    """Insert it unless it is there, which happens when a request is repeated. Returns whether it was inserted.

    `size_bytes` is the size of the adapter's files."""
    if sampler_exists(connection, sampler.id):
        return False
    _insert(connection, sampler, seq_id, size_bytes)
    return True


def _insert(connection: Connection, sampler: Sampler, seq_id: int, size_bytes: int | None) -> None:
    now = time.time()
    values = {
        "id": sampler.id,
        "session_id": sampler.session_id,
        "tenant": sampler.tenant,
        "seq_id": seq_id,
        "base_model": sampler.base_model,
        "model_path": sampler.model_path,
        "weights": sampler.weights,
        "status": "active",
        "created_at": now,
        "size_bytes": size_bytes,
        "last_used_at": None if isinstance(sampler.weights, BaseWeights) else now,
    }
    connection.execute(insert(samplers), values)


def _record_use(connection: Connection, sampler: Sampler, saved: Checkpoint) -> None:
    details = {
        "tinker_path": sampler.model_path,
        "model_id": saved.path.model_id,
        "session_id": sampler.session_id,
        "sampling_session_id": sampler.id,
    }
    if saved.tenant != sampler.tenant:
        details["reader"] = sampler.tenant
    audit.record(connection, saved.tenant, "checkpoint_sampled", **details)


def _found(
    connection: Connection, sampling_session_id: str, tenant: str, scope_of: ScopeOf
) -> tuple[Sampler | None, bool]:
    """A tenant's open sampling session, and whether its session is active."""
    owner = connection.execute(select(samplers.c.tenant).where(samplers.c.id == sampling_session_id)).scalar()
    sampler = find_sampler(connection, sampling_session_id, scope_of) if owner == tenant else None
    if sampler is None:
        return None, False
    status = connection.execute(select(sessions.c.status).where(sessions.c.id == sampler.session_id)).scalar()
    return sampler, status == "active"


class Samplers:
    """Sampling sessions, cached in memory, so that a sample need not read the database to find its own."""

    def __init__(self, database: Database, writer: GroupCommitWriter, scope_of: ScopeOf = _everything) -> None:
        """A server with several base models gives `scope_of`."""
        self._database = database
        self._writer = writer
        self._scope_of = scope_of
        self._known: SessionCache[Sampler] = SessionCache()
        self._used: set[str] = set()
        """Ids of the sampling sessions that were used since `write_uses` last wrote them."""

    async def create(
        self,
        sampler: Sampler,
        seq_id: int,
        saved: Checkpoint | None = None,
        check: Callable[[Connection], None] | None = None,
    ) -> Sampler:
        """Add it, or return the one that was added under this id before. `saved` is the checkpoint that it samples
        from. Raises what `check` raises of a new one."""

        def add(connection: Connection) -> Sampler:
            if sampler_exists(connection, sampler.id):
                return find_sampler(connection, sampler.id, self._scope_of) or sampler
            if check is not None:
                check(connection)
            _insert(connection, sampler, seq_id, None if saved is None else saved.size_bytes)
            if saved is not None:
                _record_use(connection, sampler, saved)
            return sampler

        stored = await self._writer.transact(add)
        self._known.keep(stored)
        return stored

    async def join(self, sampler: Sampler) -> int:
        """A number for one more copy of a sampling client: 1, 2, 3… in each sampling session, none of them twice."""

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
            stored, living = await self._database.read_async(
                lambda c: _found(c, sampling_session_id, tenant, self._scope_of)
            )
            if stored is not None and living:  # nothing would ever remove a closed one from `_known`
                self._known.keep(stored)
        return stored if stored is not None and stored.tenant == tenant else None

    def forget_session(self, session_id: str) -> None:
        self._known.drop_session(session_id)

    def note_use(self, sampler: Sampler) -> None:
        """A sample was requested from it, or has ended. `write_uses` writes that later, for many samples at once."""
        if not isinstance(sampler.weights, BaseWeights):
            self._used.add(sampler.id)

    async def write_uses(self) -> None:
        """Write which sampling sessions were used, in one transaction. Call it about once a minute."""
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
        """Learn which adapters have been dropped, and refuse samples from them from now on. Call it several times in
        NOTICE_S."""
        since = time.time() - LEARN_BACK_S
        for sampler_id in await self._database.read_async(lambda c: adapter_versions.dropped_since(c, since)):
            self._known.drop(sampler_id)

    async def is_dropped(self, sampler: Sampler) -> bool:
        """Whether the database says that its adapter has been dropped."""
        query = select(samplers.c.status).where(samplers.c.id == sampler.id)
        return await self._database.read_async(lambda c: c.execute(query).scalar()) == "dropped"
