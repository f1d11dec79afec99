"""Decides which of several API processes on one database forwards a sample.

Each process writes a heartbeat into the database every BEAT_S. If a process reads the same heartbeat of another process
for MISSES rounds, it treats that process as dead and takes over its samples; the first process to do so gets them.
Rounds are counted, not seconds, because no rounds pass while the database is away or the counting process is stopped.
A process that was only stalled finds at its next round that its samples have another owner, and leaves them to that
owner. The outcome that is stored first stays.
"""

from __future__ import annotations

import logging

from skyrl.server.futures.store import FutureStore
from skyrl.server.sampling.service import SampleService
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.processes import ApiProcesses
from skyrl.storage.notices import PeerNotifier

logger = logging.getLogger(__name__)

BEAT_S = 2.0
MISSES = 5


class SampleOwnership:
    """Keeps `peers.living`, the other processes that are alive, and takes over the samples of dead ones. `forwards` is
    false if the engine samples; then no samples are taken over."""

    def __init__(
        self,
        processes: ApiProcesses,
        peers: PeerNotifier,
        futures: FutureStore,
        sampling: SampleService,
        *,
        forwards: bool,
    ) -> None:
        self._processes = processes
        self._peers = peers
        self._futures = futures
        self._sampling = sampling
        self._forwards = forwards
        self._beats: dict[str, tuple[float, int]] = {}
        """By process: the last heartbeat that was read, and the number of rounds for which it has not changed."""

    async def start(self) -> None:
        """Forward the samples of this process's predecessor, and samples that no process owns."""
        self._note_heartbeats(await self._processes.beat())
        if self._forwards:
            await self._processes.take_over({})
            await self._reconcile()

    async def round(self) -> None:
        """Call every BEAT_S: writes this process's heartbeat, and takes over the samples of dead processes."""
        self._note_heartbeats(await self._processes.beat())
        if not self._forwards or self._sampling.stopping:
            return
        taken = 0
        dead = {process: heartbeat for process, (heartbeat, rounds) in self._beats.items() if rounds >= MISSES}
        if dead or await self._processes.left():
            taken = await self._processes.take_over(dead)
            logger.info("%d samples of API processes that are gone are forwarded here; dead: %s", taken, [*dead])
        if taken or not self._peers.alone:
            await self._reconcile()

    @property
    def sees_others(self) -> bool:
        """Whether the database lists other processes, alive or dead."""
        return bool(self._beats)

    def _note_heartbeats(self, heartbeats: dict[str, float]) -> None:
        """Compare the heartbeats of other processes with those of the round before."""
        before = self._beats
        self._beats = {}
        for process, heartbeat in heartbeats.items():
            last, rounds = before.get(process, (None, 0))
            self._beats[process] = (heartbeat, rounds + 1 if heartbeat == last else 0)
        self._peers.living = frozenset(process for process, (_, rounds) in self._beats.items() if rounds < MISSES)

    async def _reconcile(self) -> None:
        """Make memory agree with the database. Forward a sample that this process owns in the database but does not
        have in memory: it was taken over, or the connection broke when it was committed. Leave a sample that another
        process owns in the database to that process."""
        forwarded = self._futures.forwarded()  # before the read: a sample recorded during the read is in the database
        owned = await self._processes.own()
        await self._adopt([request_id for request_id in owned if not self._futures.forwards(request_id)])
        not_owned = [request_id for request_id in forwarded if request_id not in owned]
        if not_owned:
            ended = await self._futures.read_outcomes(not_owned)
            self._sampling.cancel(ended + self._futures.leave(not_owned))

    async def _adopt(self, request_ids: list[str]) -> None:
        for sample in await self._processes.samples(request_ids) if request_ids else []:
            try:
                await self._sampling.adopt(sample)
            except DatabaseError:
                self._futures.leave([sample.id])  # the next round finds it again
                raise

    async def leave(self) -> None:
        """This process ends. Another process, or its next start, takes its pending samples over."""
        await self._processes.leave()
