"""Samples as commands: the waiting samples run after each turn of training.

Samples are commands only where trainer and sampler share a device (`Modes.forwards` is false). Knows the scheduler and
the rows; `sampling.ColocatedSampler` runs the samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skyrl.base.types.requests import Command
from skyrl.base.wire.errors import ErrorCategory
from skyrl.storage.db import commands as rows
from skyrl.storage.db import usage
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.training.engine.sampling import ColocatedSampler
from skyrl.training.engine.scheduler import Scheduler
from skyrl.training.engine.settlement import Settlement


class SampleTurns:
    """`sampler` is None where API processes forward samples. There, sample commands from an earlier colocated run of
    the server fail."""

    def __init__(
        self, database: Database, scheduler: Scheduler, settlement: Settlement, sampler: ColocatedSampler | None
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._settlement = settlement
        self._sampler = sampler

    def hold_or_release(self) -> None:
        """Samples wait while the sampler cannot run them."""
        self._scheduler.hold_samples(self._sampler is not None and not self._sampler.may_run)

    async def run(self) -> None:
        """Run and settle the waiting samples."""
        commands = self._scheduler.take_samples()
        if not commands:
            return
        if self._sampler is None:
            await self._fail(commands)
        else:
            await self._sample(commands, self._sampler)

    async def _fail(self, commands: Sequence[Command]) -> None:
        message = "this server now forwards samples to its inference server; send the sample again"
        outcome = Outcome(error=message, error_category=ErrorCategory.SERVER)
        await asyncio.to_thread(self._settlement.end, [(command, outcome) for command in commands])
        self._scheduler.finish(commands)

    async def _sample(self, commands: Sequence[Command], sampler: ColocatedSampler) -> None:
        ids = [command.request_id for command in commands]  # some may have been cancelled: then they have no body
        bodies = await self._database.read_async(lambda c: rows.bodies(c, ids, pending=True))
        sampled = await sampler.run(commands, bodies)
        by_id = {command.request_id: command for command in commands}
        ended = [(by_id[request_id], outcome) for request_id, outcome in sampled.outcomes]
        await asyncio.to_thread(self._settlement.end, ended, lambda c: usage.add(c, sampled.used))
        self._scheduler.finish(commands)
        for command in sampled.postponed:
            self._scheduler.add(command)
