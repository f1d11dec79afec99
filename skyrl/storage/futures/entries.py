"""Requests in the memory of an API process: pending ones, and outcomes that no client has read yet.

Does not use the database: `store` looks there for a request that is not in memory.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from skyrl.base.types.requests import Kind, RequestKey
from skyrl.storage.db.futures import Outcome
from skyrl.storage.futures.completion_feed import Target, clone_of
from skyrl.storage.shares import ROW_BYTES, DiskShares

KEPT_OUTCOMES = 20_000
KEPT_BYTES = 64 * 2**20
"""Bounds of the outcomes in memory that no client has read yet. Beyond them the oldest are forgotten, and read from the
database when a client asks."""


class Entry:
    """A request in memory.

    While `recording`, its row is being written. Repeats that arrive meanwhile wait for `recorded`. While `settling`,
    its outcome is being stored; `outcome` is set after that. `sampler` is as in `NewRequest`. `size`: the bytes that
    the request holds of its tenant's share (`DiskShares`); 0 if this process does not count it.
    """

    __slots__ = (
        "digest",
        "id",
        "key",
        "kind",
        "outcome",
        "recorded",
        "recording",
        "sampler",
        "session_id",
        "settling",
        "size",
        "tenant",
        "waiters",
    )

    def __init__(
        self,
        request_id: str,
        kind: str,
        tenant: str,
        session_id: str,
        digest: bytes,
        key: RequestKey | None,
        sampler: tuple[str, int | None] | None = None,
    ) -> None:
        self.id = request_id
        self.kind = kind
        self.tenant = tenant
        self.session_id = session_id
        self.digest = digest
        self.key = key
        self.sampler = sampler
        self.outcome: Outcome | None = None
        self.size = 0
        self.settling = False
        self.recording = False
        self.recorded: asyncio.Future[None] | None = None
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def target(self) -> Target | None:
        """The sampling client that sent the request; None for a training command."""
        return None if self.sampler is None else Target(self.session_id, self.sampler[0], clone_of(self.sampler[1]))

    @property
    def pending(self) -> bool:
        return self.outcome is None and not self.settling

    async def next_change(self, timeout_s: float) -> None:
        """Return when `wake` is called, or after `timeout_s`."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _wake, waiter)
        self.waiters.append(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self.waiters.remove(waiter)

    def wake(self) -> None:
        for waiter in self.waiters:
            _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Entries:
    """Entries by id and by key. `owned_elsewhere` has the ids of the pending requests that another process settles: the
    engine, or another API process that forwards the sample. This process settles all other requests."""

    def __init__(self, shares: DiskShares) -> None:
        self._shares = shares
        self.by_id: dict[str, Entry] = {}
        self.by_key: dict[RequestKey, Entry] = {}
        self._of_session: dict[str, dict[str, Entry]] = {}
        """Entries by session and id: thousands of sessions may end while others have 100,000 requests."""
        self.owned_elsewhere: set[str] = set()
        self._settled: OrderedDict[str, int] = OrderedDict()
        self._settled_bytes = 0

    @property
    def pending(self) -> int:
        return len(self.by_id) - len(self._settled)

    def add(self, entry: Entry, *, owned_elsewhere: bool) -> None:
        """Remember a request, and whether another process settles it. For a known request only that may change."""
        self.by_id[entry.id] = entry
        if entry.session_id not in self._of_session:
            self._of_session[entry.session_id] = {}
        self._of_session[entry.session_id][entry.id] = entry
        if entry.key is not None:
            self.by_key[entry.key] = entry
        if owned_elsewhere:
            self.owned_elsewhere.add(entry.id)
        else:
            self.owned_elsewhere.discard(entry.id)

    def hold(self, entry: Entry, size: int) -> None:
        """Count the bytes of a request that is recorded now."""
        entry.size = size
        self._shares.hold(entry.tenant, size)

    def _end(self, entry: Entry, kept: int) -> None:
        if entry.size:
            self._shares.ended(entry.tenant, entry.size, kept)
            entry.size = 0

    def drop_unrecorded(self, entry: Entry) -> None:
        """Forget a request that has no row, or the row of an earlier request."""
        self._end(entry, 0)
        self.drop(entry)

    def drop(self, entry: Entry) -> None:
        self._end(entry, entry.size)
        self._settled_bytes -= self._settled.pop(entry.id, 0)
        self.by_id.pop(entry.id, None)
        if entry.session_id in self._of_session:
            siblings = self._of_session[entry.session_id]
            if entry.id in siblings:
                del siblings[entry.id]
            if not siblings:
                del self._of_session[entry.session_id]
        self.owned_elsewhere.discard(entry.id)
        if entry.key is not None and self.by_key.get(entry.key) is entry:
            del self.by_key[entry.key]

    def is_pending(self, request_id: str) -> bool:
        """Whether the request is in memory and has not ended."""
        entry = self.by_id.get(request_id)
        return entry is not None and entry.pending

    def is_own(self, request_id: str) -> bool:
        """Whether the request is in memory and this process settles it."""
        return request_id in self.by_id and request_id not in self.owned_elsewhere

    def own_pending(self) -> list[str]:
        """Ids of the recorded, pending requests that this process settles."""
        return [e.id for e in self.by_id.values() if e.pending and not e.recording and e.id not in self.owned_elsewhere]

    def hand_over(self, request_ids: Iterable[str]) -> list[str]:
        """From now on another process settles these requests; requests that have ended or were not this process's own
        are left out. Local waiters keep waiting, and are woken when that process has stored the outcome. Returns the
        ids of the requests that were handed over."""
        handed_over = [
            request_id for request_id in request_ids if self.is_own(request_id) and self.is_pending(request_id)
        ]
        self.owned_elsewhere.update(handed_over)
        return handed_over

    def set_outcome(self, entry: Entry, outcome: Outcome) -> None:
        """Wake those who wait for this stored outcome, and keep it in memory, within the bounds, until it is read."""
        entry.outcome = outcome
        # The body of a forwarded sample is deleted when its result is stored, that of a command later.
        self._end(entry, len(outcome.result) + (ROW_BYTES if entry.kind == Kind.EXTERNAL else entry.size))
        self.owned_elsewhere.discard(entry.id)
        entry.wake()
        if entry.id not in self.by_id:
            return
        size = len(outcome.result)
        self._settled[entry.id] = size
        self._settled_bytes += size
        while len(self._settled) > KEPT_OUTCOMES or (self._settled_bytes > KEPT_BYTES and len(self._settled) > 1):
            self.forget(self.by_id[next(iter(self._settled))])

    def forget(self, entry: Entry) -> None:
        """Remove a stored outcome from memory. From now on it is read from the database."""
        if entry.id in self._settled:
            self.drop(entry)

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests, and wake those who wait for them. Returns their ids."""
        dropped = [entry for entry in self._of_session.get(session_id, {}).values() if entry.outcome is None]
        for entry in dropped:
            self.drop(entry)
            entry.wake()
        return [entry.id for entry in dropped]

    def wake_all(self) -> None:
        for entry in self.by_id.values():
            entry.wake()
