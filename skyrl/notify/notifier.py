"""All that one API process tells other processes, and all that they tell it.

Knows words and how they travel; what a word makes the process do is its caller's. `skyrl.notify` lists the words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from skyrl.notify.doorbell import Doorbell, DoorbellListener
from skyrl.notify.peers import PeerNotifier, PeerWords
from skyrl.notify.postgres import PostgresNotify

FromEngine = Callable[[list[str]], Coroutine[object, object, None]]
FromPeers = Callable[[PeerWords], Coroutine[object, object, None]]


class Notifier:
    """`engine` rings the engine of this server; `peers` tells the other API processes of the database, under the id
    `me`. Without `postgres_conninfo` there are no others: on SQLite an API process is alone."""

    def __init__(self, me: str, *, own_doorbell: Path, engine_doorbell: Path, postgres_conninfo: str | None) -> None:
        self.engine = Doorbell(engine_doorbell)
        self.peers = PeerNotifier()
        self._me = me
        self._own_doorbell = own_doorbell
        self._postgres_conninfo = postgres_conninfo
        self._listener: DoorbellListener | None = None
        self._postgres: PostgresNotify | None = None
        self._reactions: set[asyncio.Task[None]] = set()

    def listen(self, from_engine: FromEngine, from_peers: FromPeers) -> None:
        """Hear the engine from now on, and the other API processes while `run` runs. Each time words are heard, one of
        the two is called in a task of its own."""
        self._listener = DoorbellListener(self._own_doorbell, lambda words: self._react(from_engine(words)))
        self._listener.start()
        if self._postgres_conninfo is not None:
            self._postgres = PostgresNotify(
                self._postgres_conninfo, self._me, lambda words: self._react(from_peers(PeerWords.of(words)))
            )

    async def run(self) -> None:
        """Carry words between this process and the other API processes until cancelled; nothing to do on SQLite."""
        if self._postgres is not None:
            self.peers.send = self._postgres.send
            await self._postgres.run()

    def _react(self, reaction: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(reaction)
        self._reactions.add(task)
        task.add_done_callback(self._reactions.discard)

    async def close(self) -> None:
        """Hear and tell nothing any more. Reactions that still run are cancelled. `run` is to be cancelled before."""
        if self._listener is not None:
            self._listener.close()
        reactions = list(self._reactions)
        for task in reactions:
            task.cancel()
        await asyncio.gather(*reactions, return_exceptions=True)
        self.engine.close()
