"""Which samples of a sampling client have ended, read from the database at each poll: for clients whose samples and
polls come to several API processes.

A cursor is the moment of the last end that was told, in microseconds. The database gives each end a later moment than
the one before (`skyrl.db.ended_at.EndedAt`), so one process can read on from where another one stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from skyrl.futures.completions import MAX_COMPLETIONS, Completion, Target, TargetGone

LOOK_S = 1.0
"""How often a poll that is held looks again while other processes live, in case it was not told of an end there."""
MAX_CLIENTS = 1_000
"""Clients that are remembered while they do not ask."""


class Load(Protocol):
    """Reads a client's ends after a time, in their order, at most so many; with `pending`, what it still waits for is
    waited for from then on."""

    async def __call__(self, target: Target, since: float, *, limit: int, pending: bool) -> list[Completion]: ...


class _Client:
    def __init__(self) -> None:
        self.polls = 0
        self.gone = False
        self.loaded = False
        """Whether what it waits for has been read once."""
        self.changed = asyncio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class StoredEnds:
    """Takes the place of `CompletionLogs` where several API processes may share a database. `alone` says that there is
    no other one now."""

    def __init__(self, load: Load, alone: Callable[[], bool] = lambda: False) -> None:
        self._load = load
        self._alone = alone
        self._clients: dict[Target, _Client] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def held(self) -> int:
        """Polls that are waiting."""
        return sum(client.polls for client in self._clients.values())

    def note(self, target: Target, _: Completion) -> None:
        """A sample has ended, and is stored."""
        if (client := self._clients.get(target)) is not None:
            client.wake()

    def wake(self, sampling_session_id: str) -> None:
        """A sample of this sampling session has ended in another process."""
        for target, client in self._clients.items():
            if target.sampling_session_id == sampling_session_id:
                client.wake()

    async def poll(self, target: Target, cursor: int, timeout_s: float) -> tuple[int, list[Completion]]:
        """Ends after `cursor` (0: all) and the cursor of the last of them; waits up to `timeout_s` for one.

        Raises TargetGone when the session ends meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        client = self._clients.get(target) or self._remember(target)
        client.polls += 1
        try:
            ends = await self._next(client, target, cursor, deadline)
        finally:
            client.polls -= 1
        if client.gone:
            raise TargetGone(target.sampling_session_id)
        return (_cursor(ends[-1]) if ends else cursor), ends

    async def _next(self, client: _Client, target: Target, cursor: int, deadline: float) -> list[Completion]:
        # A moment is stored as a float, a quarter of a microsecond apart from the next, and rounded in its cursor.
        after = (cursor + 1) / 1e6
        while True:
            changed = client.changed  # before it is read: what ends meanwhile wakes
            ends = await self._load(target, after, limit=MAX_COMPLETIONS, pending=not client.loaded)
            client.loaded = True
            while not (ends or client.gone or self._closing or changed.is_set()):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    return []
                try:
                    async with asyncio.timeout(min(left, LOOK_S)):
                        await changed.wait()
                except TimeoutError:
                    if not self._alone():
                        break
            if ends or client.gone or self._closing:
                return ends

    def _remember(self, target: Target) -> _Client:
        if len(self._clients) >= MAX_CLIENTS:
            self._clients = {known: client for known, client in self._clients.items() if client.polls > 0}
        client = self._clients[target] = _Client()
        return client

    def drop_session(self, session_id: str) -> None:
        """Forget a closed session's clients; who polls hears that it is gone."""
        for target in [target for target in self._clients if target.session_id == session_id]:
            client = self._clients.pop(target)
            client.gone = True
            client.wake()

    def release(self) -> None:
        """The process is about to end: who polls hears now, and so does who comes."""
        self._closing = True
        for client in self._clients.values():
            client.wake()


def _cursor(end: Completion) -> int:
    return round(end.at * 1e6)
