"""How far each API process is in the order of samples, for those that send to one inference server."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, update

from skyrl.db.api_processes import processes
from skyrl.db.writer import GroupCommitWriter


class SampleClocks:
    """A column of the processes' table, as the process `me` uses it."""

    def __init__(self, writer: GroupCommitWriter, me: str) -> None:
        self._writer = writer
        self._me = me

    async def exchange(self, mine: int) -> int:
        """Say how far this process is; returns how far the others are, 0 when there are none."""

        def exchange(connection: Connection) -> int:
            connection.execute(update(processes).where(processes.c.id == self._me).values(sample_clock=mine))
            others = select(func.max(processes.c.sample_clock)).where(processes.c.id != self._me)
            return connection.execute(others).scalar() or 0

        return await self._writer.transact(exchange)
