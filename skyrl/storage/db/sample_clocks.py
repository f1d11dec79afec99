"""The sample clocks of API processes that send to one inference server (`skyrl.server.sampling.fair_order`)."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, delete, func, insert, select

from skyrl.storage.db.api_processes import processes
from skyrl.storage.db.tables.processes import SampleClockRow
from skyrl.storage.db.writer import GroupCommitWriter

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
