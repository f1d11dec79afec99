"""Which samples of a sampling client have ended, as the database has them: what one long poll for all of them reads.

The database gives each end a later moment than the one before (`skyrl.db.ended_at.EndedAt`). A cursor is the moment of
the last end that a client was told, so any process can read on from where another one stopped, also after a restart.

While clients poll, one reader follows the ends of all samples in the table, and hands each to its client. It reads when
somebody says that a sample has ended, and at most every READ_EVERY_S. What a client has not been told is kept in memory
up to a bound. A client that asks for older ends, or whose ends were forgotten, is answered from the table.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from skyrl.db import sampled
from skyrl.db.database import Connection, Database
from skyrl.db.futures import StoredFuture
from skyrl.futures.completions import Completion, Target, TargetGone, block_of, clone_of

MAX_COMPLETIONS = 1_000
"""Ends told in one answer."""
READ_EVERY_S = 0.005
"""From one read of new ends to the next: under load one read finds many, and nobody notices the time."""
MAX_READ = 5_000
"""Ends in one read of new ends. A reader that is further behind starts anew from the newest end."""
MAX_KEPT = 20_000
"""Ends kept for all clients together, for those that do not ask: then the client with most is forgotten."""
MAX_CLIENTS = 1_000
"""Clients that are remembered while they do not ask."""
LOOK_S = 1.0
"""How often a poll that is held looks while other processes live, in case it was not told of an end there."""


class _Client:
    """Ends that a client has not been told, in their order. They are whole from `since` on, which is a cursor."""

    def __init__(self, since: int) -> None:
        self.since = since
        self.ends: deque[Completion] = deque()
        self.polls = 0
        self.gone = False
        self.loaded = False
        """Whether its pending samples have been read once."""
        self.changed = asyncio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def after(self, cursor: int) -> list[Completion]:
        """What is kept after `cursor`, the first MAX_COMPLETIONS; what is not after it is forgotten."""
        while self.ends and self.ends[0].cursor <= cursor:
            self.since = self.ends.popleft().cursor
        return [self.ends[place] for place in range(min(len(self.ends), MAX_COMPLETIONS))]

    def forget(self, position: int) -> None:
        """Nothing is kept of what ended up to `position`."""
        self.ends.clear()
        self.since = position


class StoredEnds:
    """Answers the polls of one API process. `wait_for` gets the rows of a client's pending samples when it first asks,
    so that this process hears of their ends. `alone` says that no other API process lives now."""

    def __init__(
        self, database: Database, wait_for: Callable[[Sequence[StoredFuture]], None], alone: Callable[[], bool]
    ) -> None:
        self._database = database
        self._wait_for = wait_for
        self._alone = alone
        self._clients: dict[Target, _Client] = {}
        self._closing = False
        self._reading = asyncio.Lock()
        self._unread = True
        """Whether samples may have ended since the last read."""
        self._position: int | None = None
        """Up to which cursor the ends of all samples were read and handed out; None before the first read."""
        self._read_at = float("-inf")

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def held(self) -> int:
        """Polls that are waiting."""
        return sum(client.polls for client in self._clients.values())

    @property
    def kept(self) -> int:
        """Ends that clients have not been told, in memory."""
        return sum(len(client.ends) for client in self._clients.values())

    def ended(self, target: Target) -> None:
        """A sample of this client has ended, and its outcome is stored."""
        self._unread = True
        if (client := self._clients.get(target)) is not None:
            client.wake()

    def ended_elsewhere(self, sampling_session_id: str) -> None:
        """A sample of this sampling session has ended in another process."""
        self._unread = True
        for target, client in self._clients.items():
            if target.sampling_session_id == sampling_session_id:
                client.wake()

    async def poll(self, target: Target, cursor: int, timeout_s: float) -> tuple[int, list[Completion]]:
        """Ends after `cursor` (0: all) and the cursor of the last of them; waits up to `timeout_s` for one.

        Raises TargetGone when the session ends meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        if not self._alone():
            self._unread = True
        client = self._clients.get(target) or self._remember(target)
        client.polls += 1
        try:
            ends = await self._next(client, target, cursor, deadline)
        finally:
            client.polls -= 1
        if client.gone:
            raise TargetGone(target.sampling_session_id)
        return (ends[-1].cursor if ends else cursor), ends

    async def _next(self, client: _Client, target: Target, cursor: int, deadline: float) -> list[Completion]:
        while True:
            changed = client.changed  # before the read: an end that comes during the read sets it
            await self._read_on()
            if client.loaded and cursor >= client.since:
                ends = client.after(cursor)
            else:
                since = client.since
                ends = await self._load(client, target, cursor)
                if not ends:  # whatever ends from now on is handed out by `_read_on`
                    cursor = max(cursor, since)
            if ends or client.gone or self._closing:
                return ends
            while not (changed.is_set() or client.gone or self._closing):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    return []
                try:
                    async with asyncio.timeout(min(left, LOOK_S)):
                        await changed.wait()
                except TimeoutError:
                    if not self._alone():
                        self._unread = True
                        break

    async def _load(self, client: _Client, target: Target, cursor: int) -> list[Completion]:
        """A client's ends after `cursor` from the table, and once what it waits for."""
        mine = target.sampling_session_id, *block_of(target.clone)
        # A moment is a float, and its cursor is rounded. The next end is 2 µs later at least.
        after = (cursor + 1) / 1e6
        pending = not client.loaded

        def read(connection: Connection) -> tuple[list[sampled.EndedSample], list[StoredFuture]]:
            waiting = sampled.pending_of_sampler(connection, *mine) if pending else []
            return sampled.ended_of_sampler(connection, *mine, after, MAX_COMPLETIONS), waiting

        ended, waiting = await self._database.read_async(read)
        self._wait_for(waiting)
        client.loaded = True
        return [_completion(end) for end in ended]

    async def _read_on(self) -> None:
        """Read what has ended since the last read, and hand it to the clients. One read at a time serves all polls."""
        async with self._reading:
            if not self._unread and self._position is not None:
                return
            loop = asyncio.get_running_loop()
            await asyncio.sleep(self._read_at + READ_EVERY_S - loop.time())
            self._unread = False  # before the read: an end that comes during the read sets it again
            try:
                await self._hand_out()
            except BaseException:
                self._unread = True
                raise
            finally:
                self._read_at = loop.time()

    async def _hand_out(self) -> None:
        after = self._position
        ends: list[sampled.EndedSample] = []
        if after is not None:
            ends = await self._database.read_async(lambda c: sampled.ends_after(c, (after + 1) / 1e6, MAX_READ))
        if after is None or len(ends) == MAX_READ:
            newest = round(await self._database.read_async(sampled.last_end) * 1e6)
            self._position = newest
            for client in self._clients.values():
                client.forget(newest)
            return
        for end in ends:
            target = Target(end.session_id, end.sampling_session_id, clone_of(end.sample_seq_id))
            if (client := self._clients.get(target)) is not None:
                client.ends.append(_completion(end))
                client.wake()
        if ends:
            self._position = _completion(ends[-1]).cursor
            self._forget_some(self._position)

    def _forget_some(self, position: int) -> None:
        while self.kept > MAX_KEPT:
            max(self._clients.values(), key=lambda client: len(client.ends)).forget(position)

    def _remember(self, target: Target) -> _Client:
        if len(self._clients) >= MAX_CLIENTS:
            self._clients = {known: client for known, client in self._clients.items() if client.polls > 0}
        client = self._clients[target] = _Client(self._position or 0)
        return client

    def drop_session(self, session_id: str) -> None:
        """Forget a closed session's clients. Their polls raise TargetGone."""
        for target in [target for target in self._clients if target.session_id == session_id]:
            client = self._clients.pop(target)
            client.gone = True
            client.wake()

    def release(self) -> None:
        """The process is about to end: polls that wait, and polls that come, are answered at once."""
        self._closing = True
        for client in self._clients.values():
            client.wake()


def _completion(end: sampled.EndedSample) -> Completion:
    return Completion(end.request_id, end.size, end.ended_at)
