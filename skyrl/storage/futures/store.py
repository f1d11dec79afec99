"""The futures of an API process: a request is recorded, its client waits for it, and it ends with an outcome.

Clients wait in memory while a request is pending, else the outcome is read from the database. The outcome of a sample
that this process forwards is stored first, then told to those who wait, here and in other processes. Outcomes that
other processes have stored are read from the database: as soon as a notice of them arrives, and every second in case a
notice was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from skyrl.base.types.requests import PASSES, SAMPLES, Kind, NewRequest, RequestKey, check_repeat, new_request_id
from skyrl.base.wire.errors import ErrorCategory
from skyrl.runtime.processes.backoff import Backoff
from skyrl.runtime.processes.logs import LimitedLog, plain
from skyrl.runtime.tracing import RequestTrace, current_trace
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Change, Connection, Database, in_groups
from skyrl.storage.db.faults import ConstraintError, DatabaseError, is_transient, reason
from skyrl.storage.db.futures import Outcome, StoredFuture
from skyrl.storage.db.models import record_numbered
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.futures.completion_feed import CompletionFeed
from skyrl.storage.futures.entries import Entries, Entry
from skyrl.storage.notices import PeerNotifier
from skyrl.storage.shares import ROW_BYTES, DiskShares

logger = logging.getLogger(__name__)

LARGE_BODY_BYTES = 256 * 2**10
"""Larger bodies are hashed on a thread, and written in a transaction of their own instead of the group commit."""
BOUNDED = PASSES | SAMPLES | {Kind.CREATE_MODEL}
"""The kinds with bodies and results of any size, or with a row that stays. Of the others SHORT_BYTES are enough, and a
model's later commands wait for them: up to that size they may go beyond a tenant's share."""
SHORT_BYTES = 4096
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0
"""The pauses between tries to store an outcome."""
SAFETY_POLL_S = 1.0
"""How often the outcomes of requests that other processes settle are looked up, in case a notice was lost. There are no
look-ups while no such request is pending."""


class FutureStore:
    """All requests of one API process. `owner` is the name of the process: it owns the samples that it forwards.
    `peers` tells the other API processes of the database which requests have ended here. `recorder` writes the rows of
    new forwarded samples, which nobody reads in the order of their commits; `writer` writes all else, and does without
    `recorder`. `shares` bounds what each tenant's samples and passes put into the database.

    `record`, `wait` and `settle` are one coroutine each: every sample passes through them, and a coroutine around a
    coroutine would cost it time."""

    def __init__(
        self,
        database: Database,
        writer: GroupCommitWriter,
        owner: str | None = None,
        peers: PeerNotifier | None = None,
        recorder: GroupCommitWriter | None = None,
        shares: DiskShares | None = None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._owner = owner
        self._peers = peers = peers or PeerNotifier()
        self._recorder = recorder or writer
        self._shares = shares or DiskShares()
        self._entries = Entries(self._shares)
        self._large_writes = asyncio.Lock()
        self._failures = LimitedLog(logger)
        self._closing = False
        self.ends = CompletionFeed(database, self.follow, lambda: peers.alone)
        """Answers the long polls for all samples of a client."""

    # A request comes in.

    def record(self, request: NewRequest, first: Change | None = None) -> Coroutine[Any, Any, tuple[str, bool]]:
        """Store a request durably. Returns its id, and whether the caller must start it. A repeat returns the id of the
        first request, which was started before. `first` runs in the transaction that stores the request's row, before
        the row is written: both changes are stored, or neither.

        Raises RequestError when the key was used before with another body, or when the tenant has its share of the
        disk, and what `first` raises.
        """
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
        self._shares.check(request.tenant, short=request.kind not in BOUNDED and len(request.body) <= SHORT_BYTES)
        entry = Entry(
            request.id or new_request_id(),
            request.kind,
            request.tenant,
            request.session_id,
            digest,
            key,
            request.sampler,
        )
        self._entries.hold(entry, len(request.body) + ROW_BYTES)
        entry.recording = True
        self._entries.add(entry, owned_elsewhere=request.kind != Kind.EXTERNAL)
        try:
            await self._insert(entry, request, first, large=large)
        except BaseException as error:
            self._entries.drop_unrecorded(entry)
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

    async def record_ended(self, request: NewRequest, outcome: Outcome, first: Change) -> str:
        """Store a request that ends at once, with its outcome. Returns its id. `first` is as in `record`. A repeat gets
        an id of its own."""
        entry = Entry(new_request_id(), request.kind, request.tenant, request.session_id, request.digest(), None)
        parameters = self._parameters(entry, request)

        def insert(connection: Connection) -> None:
            first(connection)
            rows.record(connection, parameters)
            rows.settle(connection, [(entry.id, outcome)], time.time())

        await self._writer.transact(insert)
        return entry.id

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

    # Its client waits for it.

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """The stored outcome, or None when there is none after `timeout_s`. A returned
        outcome is removed from memory; the database still has it.

        Raises KeyError when no such request is stored, or when it belongs to another tenant.
        """
        entry = self._entries.by_id.get(request_id)
        if entry is None:
            stored = await self._database.read_async(lambda connection: rows.find(connection, request_id))
            if stored is None or stored.tenant != tenant:
                raise KeyError(request_id)
            if stored.outcome is not None:
                return stored.outcome
            entry = self._entries.by_id.get(request_id) or self._add_entry(stored)
        if entry.tenant != tenant:
            raise KeyError(request_id)
        if entry.outcome is None and not self._closing:
            await entry.next_change(timeout_s)
        if entry.outcome is not None:
            self._entries.forget(entry)
            return entry.outcome
        if request_id not in self._entries.by_id and not self._closing:
            raise KeyError(request_id)
        return None

    def _add_entry(self, stored: StoredFuture) -> Entry:
        """Add an entry for a pending row that is not in memory. Another process settles it, because the samples that
        this process forwards are in memory."""
        sampling_session = stored.sampling_session_id
        sampler = None if sampling_session is None else (sampling_session, stored.sample_seq_id)
        entry = Entry(stored.id, stored.kind, stored.tenant, stored.session_id, stored.digest, None, sampler)
        self._entries.add(entry, owned_elsewhere=True)
        return entry

    def follow(self, pending: Sequence[StoredFuture]) -> None:
        """Learn of the outcomes of these pending rows from now on."""
        for stored in pending:
            if stored.id not in self._entries.by_id:
                self._add_entry(stored)

    async def kind_of(self, request_id: str, tenant: str) -> Kind:
        """Raises KeyError when no such request is stored, or when it belongs to another tenant."""
        request = self._entries.by_id.get(request_id)
        request = request or await self._database.read_async(lambda connection: rows.find(connection, request_id))
        if request is None or request.tenant != tenant:
            raise KeyError(request_id)
        return Kind(request.kind)

    def is_pending(self, request_id: str) -> bool:
        """Whether the request is in memory and has not ended."""
        return self._entries.is_pending(request_id)

    @property
    def pending(self) -> int:
        return self._entries.pending

    # The request ends.

    async def settle(self, request_id: str, outcome: Outcome) -> None:
        """End a forwarded sample: store its outcome, then tell those who wait. Returns when the outcome is durable.

        Tries again until the database takes the outcome. Nobody is told before, because after a crash the sample is
        forwarded again and may have another outcome. If the request was dropped meanwhile, the outcome is discarded.
        """
        entry = self._entries.by_id.get(request_id)
        if entry is None or not entry.pending:
            logger.info("request %s ended after it was dropped; its result is discarded", request_id)
            return
        entry.settling = True
        try:
            self._tell(entry, await self._store(request_id, outcome, time.time()))
        finally:
            entry.settling = False
        self._peers.request_ended(request_id, None if entry.sampler is None else entry.sampler[0])

    async def _store(self, request_id: str, outcome: Outcome, now: float) -> Outcome:
        """Store the outcome of a sample. Returns the stored outcome, which may be another one: the row may have ended
        before (with its session, or in another process), and a result that the database refuses for good is replaced by
        a failure."""
        backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S)
        while True:
            try:
                changed = await self._writer.execute(rows.SETTLE_SAMPLE, rows.settlement(request_id, outcome, now))
                if changed:
                    return outcome
                stored = await self._database.read_async(lambda connection: rows.find(connection, request_id))
                return outcome if stored is None or stored.outcome is None else stored.outcome
            except DatabaseError as error:
                if not is_transient(error):
                    if outcome.error is not None:
                        raise
                    logger.error("the result of request %s cannot be stored: %s", request_id, reason(error))
                    outcome = Outcome(error="the result cannot be stored", error_category=ErrorCategory.SERVER)
                    continue
                retry_s = backoff.pause()
                logger.error("a result cannot be stored, tried again in %g s: %s", retry_s, reason(error))
                await asyncio.sleep(retry_s)

    def _tell(self, entry: Entry, outcome: Outcome) -> None:
        """Tell a stored outcome to those who wait for it in this process."""
        if outcome.error is not None:
            self._log_failure(entry, outcome)
        self._entries.set_outcome(entry, outcome)
        if (target := entry.target) is not None:
            self.ends.ended(target)

    def _log_failure(self, entry: Entry, outcome: Outcome) -> None:
        """Log a limited number of failures: a client may have thousands of requests that fail with the same cause."""
        server_fault = outcome.error_category != ErrorCategory.USER
        self._failures.say(
            logging.WARNING if server_fault else logging.INFO,
            (entry.tenant, entry.kind, outcome.error_category),
            f"failed {entry.kind} {entry.id} (tenant {entry.tenant}, category {outcome.error_category}): "
            f"{plain(outcome.error or '')}",
        )

    async def end(self, request_id: str, outcome: Outcome) -> bool:
        """End a pending request with an outcome that nobody had to compute, for example of a cancelled request. Returns
        False if the request had ended before: the first outcome stays."""
        entry = self._entries.by_id.get(request_id)
        if entry is not None and entry.kind == Kind.EXTERNAL:
            if not entry.pending:
                return False
            await self.settle(request_id, outcome)
            return True
        ended = await self._writer.transact(lambda c: rows.settle_pending(c, request_id, outcome, time.time()))
        await self.read_outcomes([request_id])
        if ended:
            self._peers.request_ended(request_id)
        return ended

    async def read_outcomes(self, request_ids: Iterable[str]) -> list[str]:
        """Read outcomes that another process has stored, and tell those who wait for them. Returns the ids of those
        requests that this process was forwarding."""
        pending_ids = [request_id for request_id in request_ids if self._entries.is_pending(request_id)]
        forwarded: list[str] = []
        for some_ids in in_groups(pending_ids):
            for stored in await self._database.read_async(lambda c, ids=some_ids: rows.find_settled(c, ids)):
                entry = self._entries.by_id.get(stored.id)
                if entry is None or not entry.pending or stored.outcome is None:
                    continue
                if self._entries.is_own(entry.id):
                    forwarded.append(entry.id)
                self._tell(entry, stored.outcome)
        return forwarded

    async def poll_outcomes(self) -> None:
        """Look up the outcomes of all pending requests that other processes settle."""
        if self._entries.owned_elsewhere:
            ids = list(self._entries.owned_elsewhere)
            await self.read_outcomes(await self._database.read_async(lambda c: rows.ended_among(c, ids)))

    # Which process settles the request.

    def adopt(
        self, request_id: str, tenant: str, session_id: str, digest: bytes, sampler: tuple[str, int | None] | None
    ) -> bool:
        """Remember a pending sample that was found in the database: this process settles it. `sampler`: its sampling
        session, and its number there. Returns False if this process settles it already."""
        if self._entries.is_own(request_id):
            return False
        key = None if sampler is None or sampler[1] is None else ("sample", sampler[0], sampler[1])
        entry = self._entries.by_id.get(request_id)
        entry = entry or Entry(request_id, Kind.EXTERNAL, tenant, session_id, digest, key, sampler)
        entry.key = key
        self._entries.add(entry, owned_elsewhere=False)
        return True

    def leave(self, request_ids: Iterable[str]) -> list[str]:
        """Hand over samples to another process: those that this process forwards and that have not ended. Local waiters
        keep waiting. Returns the ids of the samples that were handed over."""
        return self._entries.hand_over(request_ids)

    def forwards(self, request_id: str) -> bool:
        """Whether the request is in memory and this process settles it."""
        return self._entries.is_own(request_id)

    def forwarded(self) -> list[str]:
        """Ids of the recorded, pending requests that this process settles."""
        return self._entries.own_pending()

    # Its session, or the process, ends.

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests in memory. Those who wait for them get KeyError or TargetGone.
        Returns the ids of the requests."""
        self.ends.drop_session(session_id)
        return self._entries.drop_session(session_id)

    async def fail_session(self, session_id: str) -> None:
        """Fail a closed session's pending samples in the database. For a server without an engine; the engine does it
        otherwise."""
        await self._writer.transact(
            lambda c: rows.end_requests_of_sessions(c, [session_id], time.time(), Kind.EXTERNAL)
        )

    def release_waiters(self) -> None:
        """Answer at once all that wait, and all that come, that there is no outcome yet: the process is about to
        end."""
        self._closing = True
        self._entries.wake_all()
        self.ends.release()


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
