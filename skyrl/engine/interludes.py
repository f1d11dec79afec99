"""Other tenants' steps between the micro-batches of a long pass.

A pass of long prompts takes seconds for each micro-batch. Between two of them nothing of the pass is on the device but
its gradient so far and the scores of a micro-batch that the host has not read yet, and no other model has a part in
them: so the backend thread may run other models' commands there, and a tenant with small steps waits for a micro-batch
instead of a pass. Each model's commands keep their order, so no number changes.

The scheduler decides who goes before a pass that has begun. Knows threads and time; does not know what a command
computes, or how it is settled.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from skyrl.base.types.requests import Command
from skyrl.engine.scheduler import Scheduler
from skyrl.engine.threads import EngineSignals, EngineThreads

ASK_AFTER_S = 0.05
"""The scheduler is asked at most so often. The question takes 0.2 ms."""
MOST_S = 120.0
"""So long other steps may run within the same passes. Sessions end, models are made and commands that never arrived are
given up between two turns."""
DEEPEST = 3
"""So many passes may be interrupted at a time, each by a smaller step. Each keeps its gradient and its bodies."""


class Interrupted:
    """Passes that run together. `seconds`: how long other steps have run between their micro-batches."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands = commands
        self.seconds = 0.0
        self._asked_at = time.perf_counter()
        self._error: Exception | None = None

    @property
    def is_due(self) -> bool:
        """Whether the scheduler may be asked again."""
        may_wait = self._error is None and self.seconds < MOST_S
        return may_wait and time.perf_counter() >= self._asked_at + ASK_AFTER_S

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Other steps may run. Keeps their error, which is not one of these passes."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:  # raised by `check`
            self._error = error
        finally:
            self._asked_at = time.perf_counter()
            self.seconds += self._asked_at - began

    def check(self) -> None:
        """Raise the error of a step that ran in between: of the database, so that the engine ends."""
        if self._error is not None:
            raise self._error


class Interludes:
    """`between` and `around` are for the backend thread. `run`: how it runs and settles commands that it has taken."""

    def __init__(self, scheduler: Scheduler, threads: EngineThreads, signals: EngineSignals) -> None:
        self._scheduler = scheduler
        self._threads = threads
        self._signals = signals
        self._running: list[Interrupted] = []
        """The passes that have begun, the innermost last."""
        self.run: Callable[[Sequence[Command]], None] = lambda commands: None

    @contextlib.contextmanager
    def around(self, commands: Sequence[Command]) -> Iterator[Interrupted]:
        """Until the block ends, `between` may interrupt these passes."""
        running = Interrupted(commands)
        self._running.append(running)
        try:
            yield running
        finally:
            self._running.pop()

    def between(self) -> None:
        """Two micro-batches of the innermost passes: run the steps that go before the rest of them."""
        if not self._running or len(self._running) > DEEPEST or not (running := self._running[-1]).is_due:
            return
        with running.paused():
            until = time.perf_counter() + MOST_S - running.seconds
            taken = self._threads.wait_for_loop(self._next(running.commands, (), until))
            while taken:
                self.run(taken)
                taken = self._threads.wait_for_loop(self._next(running.commands, taken, until))

    async def _next(self, running: Sequence[Command], ended: Sequence[Command], until: float) -> list[Command]:
        if ended:
            self._scheduler.finish(ended)
            self._signals.wake()  # the model's next command may be a save
        is_over = self._signals.is_stopped or time.perf_counter() >= until
        return [] if is_over else self._scheduler.take_before(running)
