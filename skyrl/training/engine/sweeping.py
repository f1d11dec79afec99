"""The sweep: every SWEEP_S, unload unused adapters, then delete files that no row refers to.

Knows the order of these steps. `reclaim.FileSweeper` decides which files are deleted.
"""

from __future__ import annotations

import asyncio

from skyrl.inference.engine_group import EngineGroup
from skyrl.storage.db.claims import Displaced
from skyrl.storage.db.repeats import repeat
from skyrl.training.engine.reclaim import FileSweeper
from skyrl.training.engine.scheduler import Scheduler
from skyrl.training.engine.signals import EngineSignals

SWEEP_S = 10.0


class Sweep:
    """Call all methods on the event loop. The sweeper uses the database and files on worker threads."""

    def __init__(
        self, sweeper: FileSweeper, group: EngineGroup | None, scheduler: Scheduler, signals: EngineSignals
    ) -> None:
        self._sweeper = sweeper
        self._group = group
        self._scheduler = scheduler
        self._signals = signals

    async def run(self) -> None:
        """Sweep until cancelled. A sweep that fails is logged; the next one tries again."""
        await repeat("sweeping unused files", SWEEP_S, self.once)

    async def once(self) -> None:
        """One sweep. If this server has lost its claim to the database, the engine ends."""
        try:
            await self._sweep()
        except Displaced as error:
            self._signals.fail(error)

    async def _sweep(self) -> None:
        sweeper = self._sweeper
        await asyncio.to_thread(sweeper.drop_idle)
        unused = await asyncio.to_thread(sweeper.unused_adapters, self._scheduler.saving)
        for adapter in unused if self._group is None else await self._group.retire(unused):
            sweeper.unloaded(adapter)
        await asyncio.to_thread(sweeper.delete_files, self._scheduler.saving)
