"""Answers the long poll by which a sampling client learns which of its samples have ended.

An end is the row of a sample that has ended. The database gives each end a later time than the one before
(`skyrl.storage.db.futures`). A cursor is the time of the last end that a client was told. So any process can
answer the client's next poll, also after a restart.

While clients poll, new ends of all samples are read from the table together, as soon as a sample is known to have
ended, but at most every READ_EVERY_S. Ends that a client was not told yet are kept in memory, up to a bound. A client
that asks for older ends, or whose ends were forgotten, is answered from the table.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl.storage.db import futures
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.futures import StoredFuture

CLONE_BLOCK = 1_000_000_000
"""Each copy of a sampling client numbers its samples in a block of this size. The block tells which copy it is."""


@dataclass(frozen=True, slots=True)
class Target:
    """One sampling client: its sampling session, and the number of its copy (0: the first)."""

    session_id: str
    sampling_session_id: str
    clone: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that has ended. `size` is the size of its result in bytes, None for a sample that failed. `ended_at` is
    the time in its row, in seconds since the epoch."""

    request_id: str
    size: int | None
    ended_at: float

    @property
    def cursor(self) -> int:
        """The cursor of a client that was told of this sample: `ended_at` in microseconds. No two samples have the same
        cursor, because the database keeps their ends at least 2 µs apart."""
        return round(self.ended_at * 1e6)


class TargetGone(Exception):
    """The session of the polling client has ended."""


def clone_of(seq_id: int | None) -> int:
    """The copy of a sampling client whose block contains this number of a sample."""
    return 0 if seq_id is None else seq_id // CLONE_BLOCK


def block_of(clone: int) -> tuple[int | None, int]:
    """The block [first, end) of one copy. In the block of copy 0 `first` is None: samples without a number belong to
    it, too."""
    return (None if clone == 0 else clone * CLONE_BLOCK), (clone + 1) * CLONE_BLOCK


MAX_COMPLETIONS = 1_000
"""The most ends in one answer."""
READ_EVERY_S = 0.02
"""The least time between two reads of new ends: under load one read finds many. The first end after a pause is read at
once."""
MAX_READ = 5_000
"""The most ends in one read of new ends. If there are more, all clients are answered from the table until they have
reached the newest end."""
MAX_KEPT = 20_000
"""The most ends kept in memory for all clients together. Beyond that the ends of the client that has most are
forgotten."""
MAX_CLIENTS = 1_000
"""Beyond so many clients, those without a waiting poll are forgotten."""
SAFETY_READ_S = 1.0
"""How often a waiting poll reads new ends while other API processes live, in case a notice of theirs was lost."""


class _Client:
    """The ends that a client was not told yet, in their order. All ends after the cursor `kept_from` are kept."""

    def __init__(self, kept_from: int) -> None:
        self.kept_from = kept_from
        self.ends: deque[Completion] = deque()
        self.polls = 0
        self.session_ended = False
        self.pending_read = False
        """Whether its pending samples were read from the table once."""
        self.changed = asyncio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def after(self, cursor: int) -> list[Completion]:
        """The first MAX_COMPLETIONS kept ends after `cursor`. Earlier ends are forgotten."""
        while self.ends and self.ends[0].cursor <= cursor:
            self.kept_from = self.ends.popleft().cursor
        return [self.ends[index] for index in range(min(len(self.ends), MAX_COMPLETIONS))]

    def forget(self, position: int) -> None:
        """Forget all kept ends; ends after the cursor `position` will be kept."""
        self.ends.clear()
        self.kept_from = position


class CompletionFeed:
    """Answers the polls of one API process. `follow` is called with the rows of a client's pending samples at the
    client's first poll, so that this process learns of their outcomes. `alone` returns whether no other API process
    lives now."""

    def __init__(
        self, database: Database, follow: Callable[[Sequence[StoredFuture]], None], alone: Callable[[], bool]
    ) -> None:
        self._database = database
        self._follow = follow
        self._alone = alone
        self._clients: dict[Target, _Client] = {}
        self._of_sampler: dict[str, dict[Target, _Client]] = {}
        """The same by sampling session: a notice of another process names one, and thousands come in a second."""
        self._closing = False
        self._reading = asyncio.Lock()
        self._unread = True
        """Whether samples may have ended since the last read."""
        self._position: int | None = None
        """The cursor up to which ends were read and handed to their clients; None before the first read."""
        self._read_at = float("-inf")

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def held(self) -> int:
        """The number of waiting polls."""
        return sum(client.polls for client in self._clients.values())

    @property
    def kept(self) -> int:
        """The number of ends in memory."""
        return sum(len(client.ends) for client in self._clients.values())

    def ended(self, target: Target) -> None:
        """The outcome of a sample of this client is stored."""
        self._unread = True
        if (client := self._clients.get(target)) is not None:
            client.wake()

    def ended_elsewhere(self, sampling_session_id: str) -> None:
        """A sample of this sampling session has ended in another process."""
        self._unread = True
        for client in self._of_sampler.get(sampling_session_id, {}).values():
            client.wake()

    async def poll(self, target: Target, cursor: int, timeout_s: float) -> tuple[int, list[Completion]]:
        """The client's next cursor, and its ends after `cursor` (0: all). Waits up to `timeout_s` for the first end.

        Raises TargetGone when the session ends meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        if not self._alone():
            self._unread = True
        client = self._clients.get(target) or self._remember(target)
        client.polls += 1
        try:
            ends = await self._next_ends(client, target, cursor, deadline)
        finally:
            client.polls -= 1
        if client.session_ended:
            raise TargetGone(target.sampling_session_id)
        return (ends[-1].cursor if ends else cursor), ends

    async def _next_ends(self, client: _Client, target: Target, cursor: int, deadline: float) -> list[Completion]:
        while True:
            changed = client.changed  # before the read: an end that comes during the read sets this event
            await self._read_new_ends()
            if client.pending_read and cursor >= client.kept_from:
                ends = client.after(cursor)
            else:
                kept_from = client.kept_from
                ends = await self._read_from_table(client, target, cursor)
                if not ends:  # so all ends after `cursor` are, or will be, among the kept ones
                    cursor = max(cursor, kept_from)
            if ends or client.session_ended or self._closing:
                return ends
            while not (changed.is_set() or client.session_ended or self._closing):
                remaining_s = deadline - asyncio.get_running_loop().time()
                if remaining_s <= 0:
                    return []
                try:
                    async with asyncio.timeout(min(remaining_s, SAFETY_READ_S)):
                        await changed.wait()
                except TimeoutError:
                    if not self._alone():
                        self._unread = True
                        break

    async def _read_from_table(self, client: _Client, target: Target, cursor: int) -> list[Completion]:
        """A client's ends after `cursor`. The first time, also follow the client's pending samples."""
        block = target.sampling_session_id, *block_of(target.clone)
        after = _after(cursor)
        read_pending = not client.pending_read

        def read(connection: Connection) -> tuple[list[futures.EndedSample], list[StoredFuture]]:
            pending = futures.pending_of_sampler(connection, *block) if read_pending else []
            return futures.ended_of_sampler(connection, *block, after, MAX_COMPLETIONS), pending

        ended, pending = await self._database.read_async(read)
        self._follow(pending)
        client.pending_read = True
        return [_completion(end) for end in ended]

    async def _read_new_ends(self) -> None:
        """Read the ends since the last read, and hand them to their clients. One read at a time serves all polls."""
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
        position = self._position
        ends: list[futures.EndedSample] = []
        if position is not None:
            ends = await self._database.read_async(lambda c: futures.ends_after(c, _after(position), MAX_READ))
        if position is None or len(ends) == MAX_READ:
            newest = round(await self._database.read_async(futures.last_end) * 1e6)
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
            self._forget_beyond_bound(self._position)

    def _forget_beyond_bound(self, position: int) -> None:
        while self.kept > MAX_KEPT:
            max(self._clients.values(), key=lambda client: len(client.ends)).forget(position)

    def _remember(self, target: Target) -> _Client:
        if len(self._clients) >= MAX_CLIENTS:
            for known in [known for known, client in self._clients.items() if client.polls == 0]:
                self._drop(known)
        client = self._clients[target] = _Client(self._position or 0)
        self._of_sampler.setdefault(target.sampling_session_id, {})[target] = client
        return client

    def _drop(self, target: Target) -> _Client:
        siblings = self._of_sampler[target.sampling_session_id]
        del siblings[target]
        if not siblings:
            del self._of_sampler[target.sampling_session_id]
        return self._clients.pop(target)

    def drop_session(self, session_id: str) -> None:
        """Forget a closed session's clients. Their polls raise TargetGone."""
        for target in [target for target in self._clients if target.session_id == session_id]:
            client = self._drop(target)
            client.session_ended = True
            client.wake()

    def release(self) -> None:
        """Answer at once all polls that wait, and all that come: the process is about to end."""
        self._closing = True
        for client in self._clients.values():
            client.wake()


def _after(cursor: int) -> float:
    """A time after the end that has this cursor and before the next end. The cursor is a rounded time, and the next end
    is at least 2 µs later."""
    return (cursor + 1) / 1e6


def _completion(end: futures.EndedSample) -> Completion:
    return Completion(end.request_id, end.size, end.ended_at)
