"""API processes that serve one database: who lives, and who forwards the samples of who does not.

An id is that of a server and a place in it, so a process that is started again is its predecessor. Nobody compares
clocks: a heartbeat is only ever asked whether it has changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, delete, insert, or_, select, update

from skyrl.db.database import Database
from skyrl.db.futures import MAX_NAMED, futures
from skyrl.db.tables import ApiProcessRow
from skyrl.db.writer import GroupCommitWriter
from skyrl.types.kinds import Kind

processes = ApiProcessRow.__table__  # type: ignore[attr-defined]

_FORWARDED = and_(futures.c.status == "pending", futures.c.kind == Kind.EXTERNAL)
_NOBODYS = or_(futures.c.owner.is_(None), futures.c.owner.not_in(select(processes.c.id)))


class ApiProcesses:
    """The table, as the process `me` uses it."""

    def __init__(self, database: Database, writer: GroupCommitWriter, me: str) -> None:
        self._database = database
        self._writer = writer
        self.me = me

    async def beat(self) -> dict[str, float]:
        """Say "alive"; returns the heartbeats of the others that are there, by id."""

        def beat(connection: Connection) -> dict[str, float]:
            now = time.time()
            mine = update(processes).where(processes.c.id == self.me).values(heartbeat_at=now)
            if connection.execute(mine).rowcount == 0:
                connection.execute(insert(processes), {"id": self.me, "started_at": now, "heartbeat_at": now})
            others = select(processes.c.id, processes.c.heartbeat_at).where(processes.c.id != self.me)
            return {row.id: row.heartbeat_at for row in connection.execute(others)}

        return await self._writer.transact(beat)

    async def take_over(self, dead: Mapping[str, float]) -> int:
        """Be the owner of pending samples whose owner is not there: of those `dead`, unless they have beaten since
        the heartbeat that is given, of those who left, and of those from before there were owners. Writes come one by
        one, so each sample is taken by one process. Returns how many were taken."""

        def take(connection: Connection) -> int:
            for process, heartbeat_at in dead.items():
                still = and_(processes.c.id == process, processes.c.heartbeat_at == heartbeat_at)
                connection.execute(delete(processes).where(still))
            return connection.execute(update(futures).where(_FORWARDED, _NOBODYS).values(owner=self.me)).rowcount

        return await self._writer.transact(take)

    async def left(self) -> bool:
        """Whether pending samples are of an owner that is not there."""
        orphan = select(futures.c.n).where(_FORWARDED, _NOBODYS).limit(1)
        return await self._database.read_async(lambda c: c.execute(orphan).first() is not None)

    async def own(self) -> set[str]:
        """Ids of the pending samples that are this process's to forward."""
        query = select(futures.c.id).where(_FORWARDED, futures.c.owner == self.me)
        return await self._database.read_async(lambda c: set(c.execute(query).scalars()))

    async def rows(self, request_ids: Sequence[str]) -> list[Any]:
        """Whole rows of those that still are its to forward, in order of arrival."""
        query = select(futures).where(_FORWARDED, futures.c.owner == self.me).order_by(futures.c.n)
        found: list[Any] = []
        for start in range(0, len(request_ids), MAX_NAMED):
            named = query.where(futures.c.id.in_(request_ids[start : start + MAX_NAMED]))
            found += await self._database.read_async(lambda c, named=named: list(c.execute(named)))
        return found

    async def leave(self) -> None:
        """This process ends: what it leaves is for the others, or for its next start."""
        await self._writer.transact(lambda c: c.execute(delete(processes).where(processes.c.id == self.me)))
