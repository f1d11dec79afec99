"""Requests as the API process sees them: recorded once, waited for in memory, read from the database when not there.

Knows ids, keys and outcomes. Does not know what a request asks for, nor who computes its result. Other API processes
of the database record and settle theirs: what ends here they are told, what ends there is looked for (`read_outcomes`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from skyrl.db import futures as rows
from skyrl.db import sampled
from skyrl.db.database import Change, Connection, Database
from skyrl.db.faults import ConstraintError
from skyrl.db.futures import Outcome, StoredFuture
from skyrl.db.sampled import EndedSample
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.completions import Completion, CompletionLogs, Target, block_of
from skyrl.futures.entries import Entries, Entry
from skyrl.futures.recording import LARGE_BODY_BYTES, Recorder, store_outcome
from skyrl.futures.stored_ends import StoredEnds
from skyrl.notify.peers import PeerNotifier
from skyrl.processes.log_limits import LimitedLog, plain
from skyrl.types.ids import new_request_id
from skyrl.types.kinds import Kind
from skyrl.types.requests import NewRequest, RequestKey, same_request
from skyrl.wire.errors import ErrorCategory

logger = logging.getLogger(__name__)

SAFETY_POLL_S = 1.0
"""How often pending requests of others are looked up in case a ring was lost; not at all while none is pending."""


def _completion(request_id: str, outcome: Outcome, at: float) -> Completion:
    return Completion(request_id, None if outcome.error is not None else len(outcome.result), at)


class FutureStore:
    """All requests of one API process, which is the `owner` of what it forwards. `others` are told what ends here."""

    def __init__(
        self,
        database: Database,
        writer: GroupCommitWriter,
        owner: str | None = None,
        notifier: PeerNotifier | None = None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._owner = owner
        self._notifier = notifier or PeerNotifier()
        self._entries = Entries()
        self._closing = False
        self._failures = LimitedLog(logger)
        self._recorder = Recorder(database, writer, owner)
        self.completions = (
            CompletionLogs(self._all_ends_of)
            if database.is_sqlite
            else StoredEnds(self._ends_of, lambda: self._notifier.alone)
        )

    async def record(self, request: NewRequest, first: Change | None = None) -> tuple[str, bool]:
        """Store a request durably; returns its id and whether it is new, and so for the caller to start. A repeat
        returns the first one's id. `first` runs in the transaction that stores the request, before the request's row:
        both are stored, or neither.

        Raises RequestError when the key was used before with another body, and whatever `first` raises.
        """
        key, large = request.key, len(request.body) > LARGE_BODY_BYTES
        digest = await asyncio.to_thread(request.digest) if large else request.digest()
        while key is not None and (known := self._entries.by_key.get(key)) is not None:
            if not known.recording:
                return same_request(known.id, known.digest, digest, key), False
            if known.recorded is None:
                known.recorded = asyncio.get_running_loop().create_future()
            await asyncio.shield(known.recorded)  # and look again: it may have failed, and it is then for us to try
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
            await self._recorder.insert(entry.id, entry.digest, request, first, large=large)
        except BaseException as error:
            self._entries.drop(entry)
            if not isinstance(error, ConstraintError) or key is None:
                raise
            stored = await self._recorder.find(key)
            if stored is None:
                raise
            return same_request(stored.id, stored.digest, digest, key), self._take_over(stored, entry)
        finally:
            entry.recording = False
            if entry.recorded is not None:
                entry.recorded.set_result(None)
        if entry.id not in self._entries.by_id:
            # Its session was closed while it was written, so that it may have missed the settling of all the others.
            await self._writer.execute(rows.SETTLE, rows.settlement(entry.id, rows.SESSION_ENDED, time.time()))
            return entry.id, False
        return entry.id, True

    def _take_over(self, stored: StoredFuture, entry: Entry) -> bool:
        """Whether this process is to forward a stored sample now. The row may exist without a task that forwards it: if
        the connection broke at its commit, the client was told that the sample was not recorded, and the row is there.
        A sample whose owner is another process is left to that process."""
        known = self._entries.by_id.get(stored.id)
        forwarded = known is not None and stored.id not in self._entries.owned_elsewhere
        if stored.outcome is not None or forwarded or stored.kind != entry.kind or entry.kind != Kind.EXTERNAL:
            return False
        if stored.owner is not None and stored.owner != self._owner:
            return False
        if known is None:
            entry.id, known = stored.id, entry
        known.key = entry.key
        self._entries.owned_elsewhere.discard(stored.id)
        self._entries.add(known, owned_elsewhere=False)
        return True

    def adopt(
        self, request_id: str, kind: Kind, tenant: str, session_id: str, digest: bytes, key: RequestKey | None
    ) -> bool:
        """Take over a pending request found in the database. False if it is known already as this process's own."""
        known = self._entries.by_id.get(request_id)
        if known is not None and request_id not in self._entries.owned_elsewhere:
            return False
        sampler = (key[1], key[2]) if key is not None and key[0] == "sample" else None
        entry = known or Entry(request_id, kind, tenant, session_id, digest, key, sampler)
        entry.key = key
        self._entries.owned_elsewhere.discard(request_id)
        self._entries.add(entry, owned_elsewhere=kind != Kind.EXTERNAL)
        return True

    def leave(self, request_ids: Iterable[str]) -> list[str]:
        """Hand over: those of these samples that are forwarded here and have not ended now belong to another process.
        Local waiters keep waiting, and are woken when that process stores the result. Returns the ids."""
        left = [request_id for request_id in request_ids if self.forwards(request_id) and self.is_pending(request_id)]
        self._entries.owned_elsewhere.update(left)
        return left

    def forwards(self, request_id: str) -> bool:
        """Whether it is known in memory and is this process's own to settle."""
        return request_id in self._entries.by_id and request_id not in self._entries.owned_elsewhere

    def forwarded(self) -> list[str]:
        """Ids of pending requests that this process is to settle."""
        return self._entries.forwarded()

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """The outcome, or None when there is none after `timeout_s`. It is stored by then, so that whoever asks again
        gets the same, and need not be kept in memory any more.

        Raises KeyError when no such request is stored, or it is another tenant's.
        """
        entry = self._entries.by_id.get(request_id)
        if entry is None:
            stored = await self._database.read_async(lambda connection: rows.find(connection, request_id))
            if stored is None or stored.tenant != tenant:
                raise KeyError(request_id)
            if stored.outcome is not None:
                return stored.outcome
            entry = self._entries.by_id.get(request_id)
            if entry is None:
                entry = self._await_stored(stored)
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

    def _await_stored(self, stored: StoredFuture) -> Entry:
        """Wait for a pending row, whatever its kind: a sample that is not forwarded here is another's to settle."""
        sampling = stored.sampling_session_id
        sampler = None if sampling is None else (sampling, stored.sample_seq_id)
        entry = Entry(stored.id, stored.kind, stored.tenant, stored.session_id, stored.digest, None, sampler)
        self._entries.add(entry, owned_elsewhere=True)
        return entry

    async def kind_of(self, request_id: str, tenant: str) -> Kind:
        """Raises KeyError when no such request is stored, or it is another tenant's."""
        known = self._entries.by_id.get(request_id)
        known = known or await self._database.read_async(lambda connection: rows.find(connection, request_id))
        if known is None or known.tenant != tenant:
            raise KeyError(request_id)
        return Kind(known.kind)

    def wake_polls(self, sampling_session_id: str) -> None:
        """A sample of this sampling session has ended in another process."""
        if isinstance(self.completions, StoredEnds):
            self.completions.wake(sampling_session_id)

    def is_pending(self, request_id: str) -> bool:
        """Whether it is known in memory and has not ended."""
        entry = self._entries.by_id.get(request_id)
        return entry is not None and entry.pending

    async def end(self, request_id: str, outcome: Outcome) -> bool:
        """Settle a pending request that is nobody's in this process, or is not to be waited for. False if it had ended:
        the first outcome stays."""
        entry = self._entries.by_id.get(request_id)
        if entry is not None and entry.kind == Kind.EXTERNAL:
            if not entry.pending:
                return False
            await self.settle(request_id, outcome)
            return True
        ended = await self._writer.transact(lambda c: rows.settle_pending(c, request_id, outcome, time.time()))
        await self.read_outcomes([request_id])
        if ended:
            self._notifier.notify([request_id])
        return ended

    async def _all_ends_of(self, target: Target, since: float) -> list[Completion]:
        return await self._ends_of(target, since, limit=None, pending=True)

    async def _ends_of(self, target: Target, since: float, *, limit: int | None, pending: bool) -> list[Completion]:
        """A sampling client's ends since then, in their order, at most `limit`; with `pending`, what it still waits for
        is waited for from now on."""
        client = target.sampling_session_id, *block_of(target.clone)

        def read(connection: Connection) -> tuple[list[EndedSample], list[StoredFuture]]:
            waiting = sampled.pending_of_sampler(connection, *client) if pending else []
            return sampled.ended_of_sampler(connection, *client, since, limit), waiting

        ended, waiting = await self._database.read_async(read)
        for sample in waiting:
            if sample.id not in self._entries.by_id:
                self._await_stored(sample)
        return [Completion(sample.id, sample.size, sample.completed_at) for sample in ended]

    async def settle(self, request_id: str, outcome: Outcome) -> None:
        """End a forwarded sample: store its outcome, then tell whoever waits; returns when the row is durable.

        Tries again for as long as the database does not take it: a result told before it is stored could be another
        one after a crash. A request that was dropped meanwhile is logged and ignored.
        """
        entry = self._entries.by_id.get(request_id)
        if entry is None or not entry.pending:
            logger.info("request %s ended after it was dropped; its result is discarded", request_id)
            return
        entry.settling, now = True, time.time()
        try:
            self._resolve(entry, await store_outcome(self._database, self._writer, request_id, outcome, now), now)
        finally:
            entry.settling = False
        self._notifier.notify((request_id,) if entry.sampler is None else (request_id, entry.sampler[0]))

    def _resolve(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """Its outcome is stored."""
        entry.outcome = outcome
        if outcome.error is not None:
            self._log_failure(entry, outcome)
        if len(self.completions) and (target := entry.target) is not None:
            self.completions.note(target, _completion(entry.id, outcome, now))
        self._entries.owned_elsewhere.discard(entry.id)
        entry.wake()
        if entry.id in self._entries.by_id:
            self._entries.keep(entry, len(outcome.result))

    def _log_failure(self, entry: Entry, outcome: Outcome) -> None:
        """Not for each one: a client may have thousands of requests that fail alike."""
        ours = outcome.error_category != ErrorCategory.USER
        self._failures.say(
            logging.WARNING if ours else logging.INFO,
            (entry.tenant, entry.kind, outcome.error_category),
            f"failed {entry.kind} {entry.id} (tenant {entry.tenant}, category {outcome.error_category}): "
            f"{plain(outcome.error or '')}",
        )

    def release_waiters(self) -> None:
        """The process is about to end: whoever waits hears now that there is no result yet, and so does who comes."""
        self._closing = True
        self.completions.release()
        for entry in self._entries.by_id.values():
            entry.wake()

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests in memory; waiters hear that they are gone. Returns their ids."""
        dropped = [e for e in self._entries.by_id.values() if e.session_id == session_id and e.outcome is None]
        for entry in dropped:
            self._entries.drop(entry)
            entry.wake()
        self.completions.drop_session(session_id)
        return [entry.id for entry in dropped]

    async def fail_session(self, session_id: str) -> None:
        """Settle a closed session's pending samples in the database; where there is an engine, it does so."""
        await self._writer.transact(
            lambda c: rows.end_requests_of_sessions(c, [session_id], time.time(), Kind.EXTERNAL)
        )

    async def read_outcomes(self, request_ids: Iterable[str]) -> list[str]:
        """Read outcomes that another process has written, and resolve who waits for them. Returns the ids of those that
        were forwarded here all the same."""
        wanted = [request_id for request_id in request_ids if self.is_pending(request_id)]
        ended: list[str] = []
        for start in range(0, len(wanted), rows.MAX_NAMED):
            part = wanted[start : start + rows.MAX_NAMED]
            for stored in await self._database.read_async(lambda c, ids=part: rows.find_settled(c, ids)):
                entry = self._entries.by_id.get(stored.id)
                if entry is None or not entry.pending or stored.outcome is None:
                    continue
                if self.forwards(entry.id):
                    ended.append(entry.id)
                self._resolve(entry, stored.outcome, time.time())
        return ended

    async def poll_outcomes(self) -> None:
        """Look for outcomes of everything that others still owe."""
        if self._entries.owned_elsewhere:
            owed = list(self._entries.owned_elsewhere)
            await self.read_outcomes(await self._database.read_async(lambda c: rows.ended_among(c, owed)))

    @property
    def pending(self) -> int:
        return self._entries.pending
