"""Saves and loads: they run on file threads while other models train.

An RL loop samples from the adapter that it has just saved, so its save does not wait for a turn of training to end. For
the same reason new commands are read while a turn runs.
"""

from __future__ import annotations

import asyncio
import logging

from skyrl.storage.db.faults import DatabaseError
from skyrl.training.engine.command_log import CommandLog
from skyrl.training.engine.execution import Execution
from skyrl.training.engine.scheduler import Scheduler
from skyrl.training.engine.signals import EngineSignals

logger = logging.getLogger(__name__)


class FileCommands:
    """Call all methods on the event loop. Each running command has its own task."""

    def __init__(self, log: CommandLog, scheduler: Scheduler, execution: Execution, signals: EngineSignals) -> None:
        self._log = log
        self._scheduler = scheduler
        self._execution = execution
        self._signals = signals
        self.running: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Until cancelled, start saves and loads whenever commands arrive, also while a turn runs."""
        while True:
            await self._signals.arrived.wait()
            self._signals.arrived.clear()
            try:
                await self._log.read()
                self.start_ready()
            except DatabaseError:
                logger.exception("new commands could not be read; the next turn tries again")

    def start_ready(self) -> None:
        """Start the saves and loads that the scheduler has, and whose turn has come."""
        for command in self._scheduler.take_file_commands():
            task = asyncio.create_task(self._execution.run_barrier(command))
            self.running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Wake the engine: commands that waited for this command may run. If the task raised, end the engine, because a
        failure of the command itself is an outcome and raises nothing."""
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._signals.fail(error)
        self._signals.wake()
