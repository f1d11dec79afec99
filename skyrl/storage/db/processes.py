"""The processes that serve one database beside the engine, as they tell each other.

API processes: their heartbeats, which of them owns each pending sample, and the clocks of those that send to one
inference server (`skyrl.sampling.gate`). Inference servers on a Ray cluster: the placement process writes
where each runs, the engine and the API processes read it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, Executable, and_, delete, func, insert, or_, select, update

from skyrl.base.types.placed_server import PlacedServer
from skyrl.base.types.requests import Kind
from skyrl.storage.db.database import Database, in_groups
from skyrl.storage.db.futures import futures
from skyrl.storage.db.repeats import repeat
from skyrl.storage.db.tables import ApiProcessRow, InferenceServerRow, SampleClockRow
from skyrl.storage.db.writer import GroupCommitWriter

processes = ApiProcessRow.__table__  # type: ignore[attr-defined]

_FORWARDED = and_(futures.c.status == "pending", futures.c.kind == Kind.EXTERNAL)
_WITHOUT_OWNER = or_(futures.c.owner.is_(None), futures.c.owner.not_in(select(processes.c.id)))
"""The owner is not in the table of API processes, or there is none."""


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A sample to forward, with its body. It must not start before `not_before` (seconds since the epoch)."""

    id: str
    tenant: str
    session_id: str
    sampling_session_id: str | None
    sample_seq_id: int | None
    digest: bytes
    body: bytes
    not_before: float | None


_SAMPLE = (
    futures.c.id,
    futures.c.tenant,
    futures.c.session_id,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.digest,
    futures.c.body,
    futures.c.not_before,
)


def _samples(connection: Connection, query: Executable) -> list[PendingSample]:
    return [PendingSample(*row) for row in connection.execute(query)]


def heartbeats(connection: Connection) -> list[tuple[str, float, float]]:
    """Id, start and last heartbeat of each API process (seconds since the epoch), in the order of the ids."""
    query = select(processes.c.id, processes.c.started_at, processes.c.heartbeat_at).order_by(processes.c.id)
    return [(row.id, row.started_at, row.heartbeat_at) for row in connection.execute(query)]


class ApiProcesses:
    """The table of API processes, for the process `process_id`."""

    def __init__(self, database: Database, writer: GroupCommitWriter, process_id: str) -> None:
        self._database = database
        self._writer = writer
        self._process_id = process_id

    async def beat(self) -> dict[str, float]:
        """Store this process's heartbeat. Returns the heartbeats of the other processes by id, in seconds since the
        epoch."""

        def beat(connection: Connection) -> dict[str, float]:
            now = time.time()
            own_beat = update(processes).where(processes.c.id == self._process_id).values(heartbeat_at=now)
            if connection.execute(own_beat).rowcount == 0:
                connection.execute(insert(processes), {"id": self._process_id, "started_at": now, "heartbeat_at": now})
            others = select(processes.c.id, processes.c.heartbeat_at).where(processes.c.id != self._process_id)
            return {row.id: row.heartbeat_at for row in connection.execute(others)}

        return await self._writer.transact(beat)

    async def take_over(self, dead: Mapping[str, float]) -> int:
        """Make this process the owner of all pending samples without a living owner. Returns their number.

        `dead` has the last heartbeats of dead processes by id. They are deleted from the table first, unless their
        heartbeat has changed. Write transactions run one at a time, so only one process takes over each sample.
        """

        def take(connection: Connection) -> int:
            for process, heartbeat_at in dead.items():
                unchanged = and_(processes.c.id == process, processes.c.heartbeat_at == heartbeat_at)
                connection.execute(delete(processes).where(unchanged))
            orphans = update(futures).where(_FORWARDED, _WITHOUT_OWNER).values(owner=self._process_id)
            return connection.execute(orphans).rowcount

        return await self._writer.transact(take)

    async def left(self) -> bool:
        """Whether there are pending samples without a living owner."""
        orphan = select(futures.c.n).where(_FORWARDED, _WITHOUT_OWNER).limit(1)
        return await self._database.read_async(lambda c: c.execute(orphan).first() is not None)

    async def own(self) -> set[str]:
        """Ids of the pending samples that this process owns."""
        query = select(futures.c.id).where(_FORWARDED, futures.c.owner == self._process_id)
        return await self._database.read_async(lambda c: set(c.execute(query).scalars()))

    async def samples(self, request_ids: Sequence[str]) -> list[PendingSample]:
        """The requests among `request_ids` that are pending samples of this process. They are in the order of arrival,
        but for more than MAX_NAMED ids only within each group of MAX_NAMED."""
        query = select(*_SAMPLE).where(_FORWARDED, futures.c.owner == self._process_id).order_by(futures.c.n)
        samples: list[PendingSample] = []
        for some in in_groups(request_ids):
            named = query.where(futures.c.id.in_(some))
            samples += await self._database.read_async(partial(_samples, query=named))
        return samples

    async def leave(self) -> None:
        """Delete this process from the table, because it ends. Other processes, or its next start, take over its
        samples."""
        await self._writer.transact(lambda c: c.execute(delete(processes).where(processes.c.id == self._process_id)))


clocks = SampleClockRow.__table__  # type: ignore[attr-defined]


class SampleClocks:
    """The clocks of the process `process_id`, one for each base model."""

    def __init__(self, writer: GroupCommitWriter, process_id: str) -> None:
        self._writer = writer
        self._process_id = process_id

    async def exchange(self, own: Mapping[str, int]) -> dict[str, int]:
        """Store this process's clocks, by base model. Returns the highest clocks of the other processes."""

        def exchange(connection: Connection) -> dict[str, int]:
            gone = clocks.c.process_id.not_in(select(processes.c.id))
            connection.execute(delete(clocks).where((clocks.c.process_id == self._process_id) | gone))
            rows = [{"process_id": self._process_id, "base_model": name, "clock": now} for name, now in own.items()]
            connection.execute(insert(clocks), rows)
            highest = select(clocks.c.base_model, func.max(clocks.c.clock).label("clock"))
            others = highest.where(clocks.c.process_id != self._process_id).group_by(clocks.c.base_model)
            return {row.base_model: row.clock for row in connection.execute(others)}

        return await self._writer.transact(exchange)


FOLLOW_S = 2.0
servers = InferenceServerRow.__table__  # type: ignore[attr-defined]


def read_servers(connection: Connection, owner: str) -> list[PlacedServer]:
    """The servers of `owner`, in the order of their names."""
    names = ("name", "kind", "url", "node", "incarnation", "reason", "sidecar_url")
    columns = [servers.c[name] for name in names]
    rows = connection.execute(select(*columns).where(servers.c.owner == owner))
    return sorted((PlacedServer(*row) for row in rows), key=lambda server: (len(server.name), server.name))


def write_servers(connection: Connection, owner: str, placed: Sequence[PlacedServer]) -> None:
    """Replace all rows of `owner`."""
    connection.execute(delete(servers).where(servers.c.owner == owner))
    for server in placed:
        values = {
            "owner": owner,
            "name": server.name,
            "kind": server.kind,
            "url": server.url,
            "node": server.node,
            "incarnation": server.incarnation,
            "reason": server.reason,
            "sidecar_url": server.sidecar_url,
            "updated_at": time.time(),
        }
        connection.execute(insert(servers), values)


async def follow_servers(
    database: Database, owner: str, rung: asyncio.Event, follow: Callable[[Sequence[PlacedServer]], Awaitable[None]]
) -> None:
    """Give `follow` the servers of `owner` every FOLLOW_S, and when `rung` is set, until cancelled."""

    async def read() -> None:
        await follow(await database.read_async(lambda c: read_servers(c, owner)))

    await repeat("reading where the vLLMs run", FOLLOW_S, read, at_once=True, rung=rung)
