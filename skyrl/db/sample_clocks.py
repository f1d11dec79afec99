"""The sample clocks of API processes that send to one inference server (`skyrl.sampling.fair_order`)."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, update

from skyrl.db.api_processes import processes
from skyrl.db.writer import GroupCommitWriter


class SampleClocks:
    """The column `sample_clock` of the processes' table, for the process `me`."""

    def __init__(self, writer: GroupCommitWriter, me: str) -> None:
        self._writer = writer
        self._me = me

    async def exchange(self, mine: int) -> int:
        """Store this process's clock. Returns the highest clock of the other processes, 0 when there are none."""

        def exchange(connection: Connection) -> int:
            connection.execute(update(processes).where(processes.c.id == self._me).values(sample_clock=mine))
            others = select(func.max(processes.c.sample_clock)).where(processes.c.id != self._me)
            return connection.execute(others).scalar() or 0

        return await self._writer.transact(exchange)
