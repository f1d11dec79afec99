"""One API process among several of a database: it learns what ended in the others, and forwards what a dead one left.

Each process writes a heartbeat into the database every BEAT_S. When a process reads the same heartbeat of another for
MISSES rounds, it treats that one as dead and takes over its samples; the first process to do so gets them. Rounds are
counted, not seconds: while the database is away, or the counting process is stopped, no rounds pass. A process that was
only stalled finds at its next round that its samples have another owner, and leaves them. The outcome that is stored
first stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from skyrl.db.api_processes import ApiProcesses
from skyrl.db.faults import DatabaseError, is_transient, reason
from skyrl.futures.store import FutureStore
from skyrl.notify.peers import PeerNotifier
from skyrl.sampling.service import SampleService

logger = logging.getLogger(__name__)

BEAT_S = 2.0
MISSES = 5


class SampleOwnership:
    """`session_changed` is called with the id of a session that another process has changed or ended. Where the engine
    samples, this process `forwards` nothing."""

    def __init__(
        self,
        processes: ApiProcesses,
        notifier: PeerNotifier,
        futures: FutureStore,
        sampling: SampleService,
        session_changed: Callable[[str], Awaitable[object]],
        *,
        forwards: bool,
    ) -> None:
        self._processes = processes
        self._notifier = notifier
        self._futures = futures
        self._sampling = sampling
        self._session_changed = session_changed
        self._beats: dict[str, tuple[float, int]] = {}
        """The others' heartbeats as they were read last, and in how many rounds they were the same."""
        self._forwards = forwards
        self._reacting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Forward what this process's predecessor left, and what is nobody's."""
        self._note(await self._processes.beat())
        if self._forwards:
            await self._processes.take_over({})
            await self._reconcile()

    async def round(self) -> None:
        """To be called every BEAT_S: say "alive", see who is not."""
        self._note(await self._processes.beat())
        if not self._forwards or self._sampling.stopping:
            return
        taken = 0
        dead = {process: at for process, (at, same) in self._beats.items() if same >= MISSES}
        if dead or await self._processes.left():
            taken = await self._processes.take_over(dead)
            logger.info("%d samples of API processes that are gone are forwarded here; dead: %s", taken, [*dead])
        if taken or not self._notifier.alone:
            await self._reconcile()

    @property
    def sees_others(self) -> bool:
        """Whether others are there, living or not."""
        return bool(self._beats)

    def _note(self, heartbeats: dict[str, float]) -> None:
        """What the others' heartbeats are now."""
        before = self._beats
        self._beats = {}
        for process, at in heartbeats.items():
            last, same = before.get(process, (None, 0))
            self._beats[process] = (at, same + 1 if at == last else 0)
        self._notifier.living = frozenset(process for process, (_, same) in self._beats.items() if same < MISSES)

    async def _reconcile(self) -> None:
        """Forward what is this process's by the database and not in its memory: it was taken over, or its commit was
        not heard of. And leave what is in its memory and another's by the database."""
        forwarded = self._futures.forwarded()  # before the database is read: what is recorded meanwhile is there
        own = await self._processes.own()
        await self._adopt([request_id for request_id in own if not self._futures.forwards(request_id)])
        strays = [request_id for request_id in forwarded if request_id not in own]
        if strays:
            ended = await self._futures.read_outcomes(strays)
            self._sampling.cancel(ended + self._futures.leave(strays))

    async def _adopt(self, request_ids: list[str]) -> None:
        for sample in await self._processes.samples(request_ids) if request_ids else []:
            try:
                await self._sampling.adopt(sample)
            except DatabaseError:
                self._futures.leave([sample.id])  # to be found again in the next round
                raise

    def on_notify(self, words: list[str]) -> None:
        """Another process has told these."""
        task = asyncio.create_task(self._heed(words))
        self._reacting.add(task)
        task.add_done_callback(self._reacting.discard)

    async def _heed(self, words: Iterable[str]) -> None:
        requests: list[str] = []
        sessions: list[str] = []
        for word in words:
            if ":" in word:
                self._futures.wake_polls(word)
            else:
                (sessions if word.startswith("s") else requests).append(word)
        try:
            self._sampling.cancel(await self._futures.read_outcomes(requests))
            for session_id in sessions:
                await self._session_changed(session_id)
        except DatabaseError as error:  # it is looked for again, by and by
            if not is_transient(error):
                raise
            logger.warning("what another API process told could not be read: %s", reason(error))

    async def leave(self) -> None:
        """What is still pending here is for the others, or for the next start."""
        for task in self._reacting:
            task.cancel()
        await asyncio.gather(*self._reacting, return_exceptions=True)
        await self._processes.leave()
