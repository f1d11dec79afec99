"""Sends the notices of one API process, and receives those for it. `skyrl.storage.notify` lists the notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from skyrl.storage.notify.doorbell import Doorbell, DoorbellListener
from skyrl.storage.notify.peers import PeerNotices, PeerNotifier
from skyrl.storage.notify.postgres import PostgresNotify

FromEngine = Callable[[list[str]], Coroutine[object, object, None]]
FromPeers = Callable[[PeerNotices], Coroutine[object, object, None]]


class Notifier:
    """`engine` rings the engines of this server. `peers` sends notices to the other API processes of the database, as
    from the process `process_id`. Without `postgres_conninfo` there are no other API processes (SQLite)."""

    def __init__(
        self, process_id: str, *, own_doorbell: Path, engine_doorbells: Sequence[Path], postgres_conninfo: str | None
    ) -> None:
        self.engine = Doorbell(*engine_doorbells)
        self.peers = PeerNotifier()
        self._process_id = process_id
        self._own_doorbell = own_doorbell
        self._postgres_conninfo = postgres_conninfo
        self._listener: DoorbellListener | None = None
        self._postgres: PostgresNotify | None = None
        self._reactions: set[asyncio.Task[None]] = set()

    def listen(self, from_engine: FromEngine, from_peers: FromPeers) -> None:
        """Receive notices of the engine from now on, and of the other API processes while `run` runs. `from_engine` or
        `from_peers` is called with them in a task."""
        self._listener = DoorbellListener(self._own_doorbell, lambda notices: self._react(from_engine(notices)))
        self._listener.start()
        if self._postgres_conninfo is not None:
            self._postgres = PostgresNotify(
                self._postgres_conninfo,
                self._process_id,
                lambda notices: self._react(from_peers(PeerNotices.of(notices))),
            )

    async def run(self) -> None:
        """Send notices to the other API processes and receive theirs until cancelled. On SQLite this returns at
        once."""
        if self._postgres is not None:
            self.peers.send = self._postgres.send
            await self._postgres.run()

    def _react(self, reaction: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(reaction)
        self._reactions.add(task)
        task.add_done_callback(self._reactions.discard)

    async def close(self) -> None:
        """Stop receiving and sending, and cancel the tasks that still run. Cancel `run` before."""
        if self._listener is not None:
            self._listener.close()
        reactions = list(self._reactions)
        for task in reactions:
            task.cancel()
        await asyncio.gather(*reactions, return_exceptions=True)
        self.engine.close()
