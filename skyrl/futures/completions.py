"""Which samples of a sampling client have ended, in order: what one long poll for all of them reads.

A log is kept for each client that asks, from its first question on, and trimmed to what the client has not seen. It can
be forgotten at any time, for the next question reads the same from the database (`load`). Knows ids, sizes and the
order of ends; results stay with the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

CLONE_BLOCK = 1_000_000_000
"""Copies of a sampling client number their samples in blocks of this size; the block says which copy."""
REREAD_S = 60.0
"""How long before a cursor's time a log begins that is read anew: an end is stamped and written a little later. To be
told of one twice harms no client."""
MAX_COMPLETIONS = 1_000
"""Ends told in one answer."""
MAX_LOG = 20_000
"""Ends kept for a client that does not ask; then its log is forgotten."""
MAX_LOGS = 100
"""Logs kept of one session's clients."""
IDLE_S = 600.0
"""A log that nobody asked for in this time is forgotten."""


@dataclass(frozen=True, slots=True)
class Target:
    """One sampling client: its sampling session, and which copy of the client it is (0: the first)."""

    session_id: str
    sampling_session_id: str
    clone: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that has ended. `size` is the result's bytes, None for one that failed; `at` is when, in seconds since
    the epoch."""

    request_id: str
    size: int | None
    at: float


class TargetGone(Exception):
    """The session has ended, and its samples with it."""


class _Log:
    """Ends with their cursors: the microsecond of each end, made to grow by one at least, so that a cursor still says
    where to read on when the log is gone."""

    def __init__(self, cursor: int) -> None:
        self.ends: deque[tuple[int, Completion]] = deque()
        self.last = cursor
        self.trimmed_to = cursor
        self.polls = 0
        self.asked_at = time.monotonic()
        self.gone = False
        self.replaced = False
        self._changed = asyncio.Event()

    def append(self, completion: Completion) -> None:
        self.last = max(self.last + 1, int(completion.at * 1e6))
        self.ends.append((self.last, completion))
        self.wake()

    def replace(self) -> None:
        """Another log tells this client's ends from now on; who waits here is to read on there."""
        self.replaced = True
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def trim(self, cursor: int) -> None:
        while self.ends and self.ends[0][0] <= cursor:
            self.trimmed_to = self.ends.popleft()[0]

    def reads_on_at(self, cursor: int) -> bool:
        """Whether everything after `cursor` is told here: not when the log has been replaced, or trimmed beyond it."""
        return not self.replaced and self.trimmed_to <= cursor

    def after(self, cursor: int) -> list[tuple[int, Completion]]:
        found: list[tuple[int, Completion]] = []
        for end in self.ends:
            if end[0] > cursor:
                found.append(end)
                if len(found) == MAX_COMPLETIONS:
                    break
        return found

    async def changed(self) -> None:
        await self._changed.wait()


class CompletionLogs:
    """Logs of the sampling clients of an API process that is the only one of its database. `load` reads a client's ends
    since a time, in their order."""

    def __init__(self, load: Callable[[Target, float], Awaitable[Iterable[Completion]]]) -> None:
        self._load = load
        self._logs: dict[Target, _Log] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._logs)

    @property
    def held(self) -> int:
        """Polls that are waiting."""
        return sum(log.polls for log in self._logs.values())

    def note(self, target: Target, completion: Completion) -> None:
        """A sample has ended. Nothing is kept for a client that has not asked, or has stopped asking."""
        log = self._logs.get(target)
        if log is None:
            return
        if len(log.ends) >= MAX_LOG and log.polls == 0:
            del self._logs[target]
            return
        log.append(completion)

    async def poll(self, target: Target, cursor: int, timeout_s: float) -> tuple[int, list[Completion]]:
        """Ends after `cursor` (0: all) and the cursor of the last of them; waits up to `timeout_s` for one.

        Raises TargetGone when the session ends meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        ends = None
        while ends is None:
            log = self._logs.get(target)
            if log is None or not log.reads_on_at(cursor):
                log = await self._read(target, cursor)
            log.polls += 1
            try:
                log.trim(cursor)
                ends = await self._next(log, cursor, deadline)
            finally:
                log.polls -= 1
                log.asked_at = time.monotonic()
            if log.gone:
                raise TargetGone(target.sampling_session_id)
        return (ends[-1][0] if ends else cursor), [completion for _, completion in ends]

    async def _next(self, log: _Log, cursor: int, deadline: float) -> list[tuple[int, Completion]] | None:
        """None when the log does not tell what comes after `cursor` any more, because somebody else asked."""
        while log.reads_on_at(cursor):
            ends = log.after(cursor)
            if ends or log.gone or self._closing:
                return ends
            try:
                async with asyncio.timeout_at(deadline):
                    await log.changed()
            except TimeoutError:
                return []
        return None

    async def _read(self, target: Target, cursor: int) -> _Log:
        """A log from the database. It is known before it is read, so that what ends meanwhile comes in as well."""
        self._make_room(target.session_id)
        if (old := self._logs.get(target)) is not None:
            old.replace()
        log = self._logs[target] = _Log(cursor)
        try:
            stored = await self._load(target, cursor / 1e6 - REREAD_S)
            noted = {completion.request_id for _, completion in log.ends}
            for completion in stored:
                if completion.request_id not in noted:
                    log.append(completion)
        except BaseException:
            if self._logs.get(target) is log:  # what is not whole must not be taken for a log
                del self._logs[target]
            log.replace()
            raise
        return log

    def _make_room(self, session_id: str) -> None:
        """Forget logs that nobody asked for lately, and of a session with many the one asked for least lately."""
        idle = [target for target, log in self._logs.items() if log.polls == 0]
        before = time.monotonic() - IDLE_S
        doomed = {target for target in idle if self._logs[target].asked_at < before}
        if sum(target.session_id == session_id for target in self._logs) >= MAX_LOGS:
            own = [target for target in idle if target.session_id == session_id]
            doomed |= set(sorted(own, key=lambda target: self._logs[target].asked_at)[:1])
        for target in doomed:
            del self._logs[target]

    def drop_session(self, session_id: str) -> None:
        """Forget a closed session's logs; who polls hears that it is gone."""
        for target in [target for target in self._logs if target.session_id == session_id]:
            log = self._logs.pop(target)
            log.gone = True
            log.wake()

    def release(self) -> None:
        """The process is about to end: who polls hears now, and so does who comes."""
        self._closing = True
        for log in self._logs.values():
            log.wake()


def clone_of(seq_id: int | None) -> int:
    """Which copy of a sampling client a sample's number belongs to."""
    return 0 if seq_id is None else seq_id // CLONE_BLOCK


def block_of(clone: int) -> tuple[int | None, int]:
    """The numbers [first, end) of one copy's samples; the first copy's begin with None, for those without a number."""
    return (None if clone == 0 else clone * CLONE_BLOCK), (clone + 1) * CLONE_BLOCK
