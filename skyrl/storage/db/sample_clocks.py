"""The sample clocks of API processes that send to one inference server (`skyrl.server.sampling.fair_order`)."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, update

from skyrl.storage.db.api_processes import processes
from skyrl.storage.db.writer import GroupCommitWriter


class SampleClocks:
    """The sample clocks in the table of API processes, for the process `process_id`."""

    def __init__(self, writer: GroupCommitWriter, process_id: str) -> None:
        self._writer = writer
        self._process_id = process_id

    async def exchange(self, own_clock: int) -> int:
        """Store this process's clock. Returns the highest clock of the other processes, 0 when there are none."""

        def exchange(connection: Connection) -> int:
            own_row = processes.c.id == self._process_id
            connection.execute(update(processes).where(own_row).values(sample_clock=own_clock))
            others = select(func.max(processes.c.sample_clock)).where(~own_row)
            return connection.execute(others).scalar() or 0

        return await self._writer.transact(exchange)
