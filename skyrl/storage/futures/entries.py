"""Requests in the memory of an API process, and how a request comes in: it is recorded once; a repeat gets its id.

`Entries` holds pending requests, and outcomes that no client has read yet. It does not use the database: `store` looks
there for a request that is not in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable
from typing import Any

from skyrl.base.types.requests import Kind, NewRequest, RequestKey, check_repeat, new_request_id
from skyrl.runtime.tracing import RequestTrace, current_trace
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Change, Connection, Database
from skyrl.storage.db.faults import ConstraintError
from skyrl.storage.db.futures import Outcome, StoredFuture
from skyrl.storage.db.models import record_numbered
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.futures.completion_feed import Target, clone_of

KEPT_OUTCOMES = 20_000
KEPT_BYTES = 64 * 2**20
"""Bounds of the outcomes in memory that no client has read yet. Beyond them the oldest are forgotten, and read from the
database when a client asks."""


class Entry:
    """A request in memory.

    While `recording`, its row is being written. Repeats that arrive meanwhile wait for `recorded`. While `settling`,
    its outcome is being stored; `outcome` is set after that. `sampler` is as in `NewRequest`.
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

    def __init__(self) -> None:
        self.by_id: dict[str, Entry] = {}
        self.by_key: dict[RequestKey, Entry] = {}
        self.owned_elsewhere: set[str] = set()
        self._settled: OrderedDict[str, int] = OrderedDict()
        self._settled_bytes = 0

    @property
    def pending(self) -> int:
        return len(self.by_id) - len(self._settled)

    def add(self, entry: Entry, *, owned_elsewhere: bool) -> None:
        """Remember a request, and whether another process settles it. For a known request only that may change."""
        self.by_id[entry.id] = entry
        if entry.key is not None:
            self.by_key[entry.key] = entry
        if owned_elsewhere:
            self.owned_elsewhere.add(entry.id)
        else:
            self.owned_elsewhere.discard(entry.id)

    def drop(self, entry: Entry) -> None:
        self.by_id.pop(entry.id, None)
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
        size = self._settled.pop(entry.id, None)
        if size is not None:
            self._settled_bytes -= size
            self.drop(entry)

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests, and wake those who wait for them. Returns their ids."""
        dropped = [e for e in self.by_id.values() if e.session_id == session_id and e.outcome is None]
        for entry in dropped:
            self.drop(entry)
            entry.wake()
        return [entry.id for entry in dropped]

    def wake_all(self) -> None:
        for entry in self.by_id.values():
            entry.wake()


LARGE_BODY_BYTES = 256 * 2**10
"""Larger bodies are hashed on a thread, and written in a transaction of their own instead of the group commit."""


class Recording:
    """Records the requests that arrive at one API process. `owner` is the name of this process. `recorder` writes the
    rows of forwarded samples, which nobody reads in the order of their commits; `writer` writes all else."""

    def __init__(
        self,
        database: Database,
        writer: GroupCommitWriter,
        recorder: GroupCommitWriter,
        entries: Entries,
        owner: str | None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._recorder = recorder
        self._entries = entries
        self._owner = owner
        self._large_writes = asyncio.Lock()

    def record(self, request: NewRequest, first: Change | None) -> Coroutine[Any, Any, tuple[str, bool]]:
        """See `FutureStore.record`."""
        trace = current_trace.get()
        return self._record(request, first) if trace is None else self._traced(request, first, trace)

    async def _traced(self, request: NewRequest, first: Change | None, trace: RequestTrace) -> tuple[str, bool]:
        began = time.time_ns()
        request_id, new = await self._record(request, first)
        trace.record("record", began, time.time_ns(), _attributes(request, request_id))
        return request_id, new

    async def _record(self, request: NewRequest, first: Change | None) -> tuple[str, bool]:
        key, large = request.key, len(request.body) > LARGE_BODY_BYTES
        digest = await asyncio.to_thread(request.digest) if large else request.digest()
        while key is not None and (known := self._entries.by_key.get(key)) is not None:
            if not known.recording:
                check_repeat(key, known.digest, digest)
                return known.id, False
            if known.recorded is None:
                known.recorded = asyncio.get_running_loop().create_future()
            await asyncio.shield(known.recorded)  # then look again: the first request may not have been recorded
        entry = Entry(
            request.id or new_request_id(),
            request.kind,
            request.tenant,
            request.session_id,
            digest,
            key,
            request.sampler,
        )
        entry.recording = True
        self._entries.add(entry, owned_elsewhere=request.kind != Kind.EXTERNAL)
        try:
            await self._insert(entry, request, first, large=large)
        except BaseException as error:
            self._entries.drop(entry)
            if not isinstance(error, ConstraintError) or key is None:
                raise
            stored = await self._find(key)
            if stored is None:
                raise
            check_repeat(key, stored.digest, digest)
            return stored.id, self._take_over(stored, entry)
        finally:
            entry.recording = False
            if entry.recorded is not None:
                entry.recorded.set_result(None)
        if entry.id not in self._entries.by_id:
            # The session was closed while the row was written, perhaps before the session's rows were failed.
            await self._writer.execute(rows.SETTLE, rows.settlement(entry.id, rows.SESSION_ENDED, time.time()))
            return entry.id, False
        return entry.id, True

    async def _insert(self, entry: Entry, request: NewRequest, first: Change | None, *, large: bool) -> None:
        """Returns when the row is durable. Raises ConstraintError when another row has this key, and what `first`
        raises."""
        parameters = self._parameters(entry, request)
        if not large and not request.numbered and first is None:
            writer = self._recorder if request.kind == Kind.EXTERNAL else self._writer
            await writer.execute(rows.RECORD, parameters)
            return

        def insert(connection: Connection) -> None:
            if first is not None:
                first(connection)
            if request.numbered:
                record_numbered(connection, parameters)
            else:
                rows.record(connection, parameters)

        if not large:
            await self._writer.transact(insert)
            return
        async with self._large_writes:  # one at a time, so that the group commit gets the write lock in between
            await asyncio.to_thread(self._database.write, insert)

    def _parameters(self, entry: Entry, request: NewRequest) -> dict[str, Any]:
        return {
            "id": entry.id,
            "kind": request.kind,
            "tenant": request.tenant,
            "session_id": request.session_id,
            "model_id": request.model_id,
            "seq_id": request.seq_id,
            "sampling_session_id": request.sampling_session_id,
            "sample_seq_id": request.sample_seq_id,
            "digest": entry.digest,
            "body": request.body,
            "body_format": request.body_format,
            "status": "pending",
            "created_at": time.time(),
            "owner": self._owner,
            "not_before": request.not_before,
            "trace": None if (trace := current_trace.get()) is None else trace.context.traceparent,
        }

    async def _find(self, key: RequestKey) -> StoredFuture | None:
        """The request that any process has recorded under this key."""
        kind, source_id, seq_id = key
        find = rows.find_command if kind == "command" else rows.find_sample
        return await self._database.read_async(lambda connection: find(connection, source_id, seq_id))

    def _take_over(self, stored: StoredFuture, entry: Entry) -> bool:
        """Make this process the owner of a repeated sample that nobody forwards. Returns whether it did; the caller
        then starts the sample. Such a row exists when the connection broke during the commit: the row was written, but
        the client was told that the sample was not recorded."""
        if stored.outcome is not None or stored.kind != entry.kind or entry.kind != Kind.EXTERNAL:
            return False
        if self._entries.is_own(stored.id) or (stored.owner is not None and stored.owner != self._owner):
            return False
        known = self._entries.by_id.get(stored.id)
        if known is None:
            entry.id, known = stored.id, entry
        known.key = entry.key
        self._entries.add(known, owned_elsewhere=False)
        return True

    def adopt(
        self, request_id: str, kind: Kind, tenant: str, session_id: str, digest: bytes, key: RequestKey | None
    ) -> bool:
        """See `FutureStore.adopt`."""
        if self._entries.is_own(request_id):
            return False
        sampler = (key[1], key[2]) if key is not None and key[0] == "sample" else None
        entry = self._entries.by_id.get(request_id)
        entry = entry or Entry(request_id, kind, tenant, session_id, digest, key, sampler)
        entry.key = key
        self._entries.add(entry, owned_elsewhere=kind != Kind.EXTERNAL)
        return True


def _attributes(request: NewRequest, request_id: str) -> dict[str, str | int]:
    """What a trace tells of a request: ids alone, and no more of the tenant than the log shows."""
    named = {
        "skyrl.request_id": request_id,
        "skyrl.kind": str(request.kind),
        "skyrl.session_id": request.session_id,
        "skyrl.tenant": request.tenant[:8],
        "skyrl.model_id": request.model_id,
        "skyrl.seq_id": request.seq_id,
        "skyrl.sampling_session_id": request.sampling_session_id,
    }
    return {name: value for name, value in named.items() if value is not None}
