"""Requests as the API process sees them: recorded once, waited for in memory, read from the database when not there.

Knows ids, keys and outcomes. Does not know what a request asks for, nor who computes its result.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.db.faults import passes, reason
from skyrl.db.futures import Outcome, StoredFuture
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.completions import Completion, CompletionLogs, Target, block_of, clone_of
from skyrl.futures.ids import new_request_id
from skyrl.futures.kinds import Kind
from skyrl.wire.errors import ErrorCategory, RequestError

logger = logging.getLogger(__name__)

Key = tuple[str, str, int]
"""("command", model_id, seq_id) or ("sample", sampling_session_id, seq_id): who repeats it gets the same request."""

KEPT_OUTCOMES = 20_000
KEPT_BYTES = 64 * 2**20
"""Outcomes that nobody has read yet are kept in memory up to here; older ones are read from the database."""

LARGE_BODY_BYTES = 256 * 2**10
"""Bodies beyond are hashed and written beside the event loop and the group commit, not by them."""

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0
"""How long a result waits between two tries to store it."""

SAFETY_POLL_S = 1.0
"""How often pending engine requests are looked up in case a ring was lost; not at all while none is pending."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to record. `body` is stored as the bytes that arrived. `identity` is what a repeat has in common with
    the first, the body when None. `id` is made when it is None; a repeat gets the first one's in any case. `not_before`
    is when it may start, in seconds since the epoch."""

    kind: Kind
    tenant: str
    session_id: str
    body: bytes
    body_format: str = "json"
    model_id: str | None = None
    seq_id: int | None = None
    sampling_session_id: str | None = None
    sample_seq_id: int | None = None
    identity: bytes | None = None
    id: str | None = None
    not_before: float | None = None

    @property
    def sampler(self) -> tuple[str, int | None] | None:
        """The sampling session it is from, and its number there."""
        return None if self.sampling_session_id is None else (self.sampling_session_id, self.sample_seq_id)

    @property
    def key(self) -> Key | None:
        if self.model_id is not None and self.seq_id is not None:
            return ("command", self.model_id, self.seq_id)
        if self.sampling_session_id is not None and self.sample_seq_id is not None:
            return ("sample", self.sampling_session_id, self.sample_seq_id)
        return None

    def digest(self) -> bytes:
        same = self.body if self.identity is None else self.identity
        return hashlib.blake2b(same, digest_size=16, person=self.kind.encode()[:16]).digest()


def _completion(request_id: str, outcome: Outcome, at: float) -> Completion:
    return Completion(request_id, None if outcome.error is not None else len(outcome.result), at)


class _Entry:
    """A request in memory. `settling` says that it has ended and is being stored; `outcome` is there once it is."""

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
        key: Key | None,
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
        """The sampling client that asked."""
        return None if self.sampler is None else Target(self.session_id, self.sampler[0], clone_of(self.sampler[1]))

    def wake(self) -> None:
        for waiter in self.waiters:
            _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class FutureStore:
    """All requests of one API process, which is the `owner` of what it forwards."""

    def __init__(self, database: Database, writer: GroupCommitWriter, owner: str | None = None) -> None:
        self._database = database
        self._writer = writer
        self._owner = owner
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[Key, _Entry] = {}
        self._settled: OrderedDict[str, int] = OrderedDict()
        self._settled_bytes = 0
        self._closing = False
        self._large = asyncio.Lock()
        self._awaited: set[str] = set()
        """Pending requests that another process settles."""
        self.completions = CompletionLogs(self._ends_of)

    async def record(self, request: NewRequest) -> tuple[str, bool]:
        """Store a request durably; returns its id and whether it is new, and so for the caller to start. A repeat
        returns the first one's id.

        Raises RequestError when the key was used before with another body.
        """
        key, large = request.key, len(request.body) > LARGE_BODY_BYTES
        digest = await asyncio.to_thread(request.digest) if large else request.digest()
        while key is not None and (known := self._by_key.get(key)) is not None:
            if not known.recording:
                return self._same(known.id, known.digest, digest, key), False
            if known.recorded is None:
                known.recorded = asyncio.get_running_loop().create_future()
            await asyncio.shield(known.recorded)  # and look again: it may have failed, and it is then for us to try
        entry = _Entry(
            request.id or new_request_id(),
            request.kind,
            request.tenant,
            request.session_id,
            digest,
            key,
            request.sampler,
        )
        entry.recording = True
        self._add(entry, awaited=request.kind != Kind.EXTERNAL)
        try:
            if large:
                await self._record_large(self._parameters(entry, request))
            else:
                await self._writer.execute(rows.RECORD, self._parameters(entry, request))
        except BaseException as error:
            self._drop(entry)
            if not isinstance(error, IntegrityError) or key is None:
                raise
            stored = await self._database.read_async(_finder(key))
            if stored is None:
                raise
            return self._same(stored.id, stored.digest, digest, key), self._take_over(stored, entry)
        finally:
            entry.recording = False
            if entry.recorded is not None:
                entry.recorded.set_result(None)
        if entry.id not in self._entries:
            # Its session was closed while it was written, so that it may have missed the settling of all the others.
            await self._writer.execute(rows.SETTLE, rows.settlement(entry.id, rows.SESSION_ENDED, time.time()))
            return entry.id, False
        return entry.id, True

    def _take_over(self, stored: StoredFuture, entry: _Entry) -> bool:
        """Whether a stored sample is to be forwarded now. Nobody may do it: if the connection broke at its commit, its
        client was told that it is not recorded, and it is."""
        known = self._entries.get(stored.id)
        forwarded = known is not None and stored.id not in self._awaited
        if stored.outcome is not None or forwarded or stored.kind != entry.kind or entry.kind != Kind.EXTERNAL:
            return False
        if known is None:
            entry.id, known = stored.id, entry
        known.key = entry.key
        self._awaited.discard(stored.id)
        self._add(known, awaited=False)
        return True

    async def _record_large(self, parameters: dict[str, object]) -> None:
        """In a transaction of its own, one at a time: small writes, in their groups, go in between."""
        async with self._large:
            await asyncio.to_thread(self._database.write, lambda c: c.execute(rows.RECORD.statement, parameters))

    @staticmethod
    def _same(request_id: str, recorded: bytes, repeated: bytes, key: Key) -> str:
        if recorded != repeated:
            name = "model_seq_id" if key[0] == "command" and key[2] == 0 else "seq_id"
            raise RequestError(f"{key[2]} was used before for {key[1]} with another body", field=name)
        return request_id

    def _parameters(self, entry: _Entry, request: NewRequest) -> dict[str, object]:
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
        }

    def _add(self, entry: _Entry, *, awaited: bool) -> None:
        self._entries[entry.id] = entry
        if entry.key is not None:
            self._by_key[entry.key] = entry
        if awaited:
            self._awaited.add(entry.id)

    def _drop(self, entry: _Entry) -> None:
        self._entries.pop(entry.id, None)
        self._awaited.discard(entry.id)
        if entry.key is not None and self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]

    def adopt(self, request_id: str, kind: Kind, tenant: str, session_id: str, digest: bytes, key: Key | None) -> None:
        """Take over a pending request found in the database at start."""
        sampler = (key[1], key[2]) if key is not None and key[0] == "sample" else None
        entry = _Entry(request_id, kind, tenant, session_id, digest, key, sampler)
        self._add(entry, awaited=kind != Kind.EXTERNAL)

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """The outcome, or None when there is none after `timeout_s`. It is stored by then, so that whoever asks again
        gets the same, and need not be kept in memory any more.

        Raises KeyError when no such request is stored, or it is another tenant's.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            stored = await self._database.read_async(lambda connection: rows.find(connection, request_id))
            if stored is None or stored.tenant != tenant:
                raise KeyError(request_id)
            if stored.outcome is not None:
                return stored.outcome
            entry = self._entries.get(request_id)
            if entry is None:
                entry = self._await_stored(stored)
        if entry.tenant != tenant:
            raise KeyError(request_id)
        if entry.outcome is None and not self._closing:
            await self._next_change(entry, timeout_s)
        if entry.outcome is not None:
            self._forget_settled(entry)
            return entry.outcome
        if request_id not in self._entries and not self._closing:
            raise KeyError(request_id)
        return None

    @staticmethod
    async def _next_change(entry: _Entry, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _wake, waiter)
        entry.waiters.append(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            entry.waiters.remove(waiter)

    def _await_stored(self, stored: Any) -> _Entry:
        """Wait for a pending row, whatever its kind: a sample that is not forwarded here is the engine's to settle."""
        sampling = stored.sampling_session_id
        sampler = None if sampling is None else (sampling, stored.sample_seq_id)
        entry = _Entry(stored.id, stored.kind, stored.tenant, stored.session_id, stored.digest, None, sampler)
        self._add(entry, awaited=True)
        return entry

    async def kind_of(self, request_id: str, tenant: str) -> Kind:
        """Raises KeyError when no such request is stored, or it is another tenant's."""
        known = self._entries.get(request_id)
        known = known or await self._database.read_async(lambda connection: rows.find(connection, request_id))
        if known is None or known.tenant != tenant:
            raise KeyError(request_id)
        return Kind(known.kind)

    def is_pending(self, request_id: str) -> bool:
        """Whether it is known in memory and has not ended."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.outcome is None and not entry.settling

    async def end(self, request_id: str, outcome: Outcome) -> bool:
        """Settle a pending request that is nobody's in this process, or is not to be waited for. False if it had ended:
        the first outcome stays."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.kind == Kind.EXTERNAL:
            if entry.outcome is not None or entry.settling:
                return False
            await self.settle(request_id, outcome)
            return True
        this = rows.futures.c.id == request_id
        ended = await self._writer.transact(lambda c: rows.settle_where(c, this, outcome, time.time()))
        await self.look([request_id])
        return bool(ended)

    async def _ends_of(self, target: Target, since: float) -> list[Completion]:
        """A sampling client's ends since then, in their order; what it still waits for is waited for from now on."""
        stored = await self._database.read_async(
            lambda c: rows.of_sampler(c, target.sampling_session_id, *block_of(target.clone), since)
        )
        ended: list[Completion] = []
        for row in stored:
            if row.status != "pending":
                size = None if row.status == "failed" else row.size or 0
                ended.append(Completion(row.id, size, row.completed_at))
            elif row.id not in self._entries:
                self._await_stored(row)
        return sorted(ended, key=lambda end: end.at)

    async def settle(self, request_id: str, outcome: Outcome) -> None:
        """End a forwarded sample: store its outcome, then tell whoever waits; returns when the row is durable.

        Tries again for as long as the database does not take it: a result told before it is stored could be another
        one after a crash. A request that was dropped meanwhile is logged and ignored.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.outcome is not None or entry.settling:
            logger.info("request %s ended after it was dropped; its result is discarded", request_id)
            return
        entry.settling, now = True, time.time()
        try:
            self._resolve(entry, await self._store(request_id, outcome, now), now)
        finally:
            entry.settling = False

    async def _store(self, request_id: str, outcome: Outcome, now: float) -> Outcome:
        """What is stored in the end: the row's own outcome if it has ended otherwise meanwhile, with its session; a
        failure in place of what the database will never take."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                changed = await self._writer.execute(rows.SETTLE_SAMPLE, rows.settlement(request_id, outcome, now))
                if changed:
                    return outcome
                stored = await self._database.read_async(lambda connection: rows.find(connection, request_id))
                return outcome if stored is None or stored.outcome is None else stored.outcome
            except DBAPIError as error:
                if not passes(error):
                    if outcome.error is not None:
                        raise
                    logger.error("the result of request %s cannot be stored: %s", request_id, reason(error))
                    outcome = Outcome(error="the result cannot be stored", error_category=ErrorCategory.SERVER)
                    continue
                logger.error("a result cannot be stored, tried again in %g s: %s", retry_s, reason(error))
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _resolve(self, entry: _Entry, outcome: Outcome, now: float) -> None:
        """Its outcome is stored."""
        entry.outcome = outcome
        if len(self.completions) and (target := entry.target) is not None:
            self.completions.note(target, _completion(entry.id, outcome, now))
        self._awaited.discard(entry.id)
        entry.wake()
        if entry.id in self._entries:
            self._keep(entry, len(outcome.result))

    def _keep(self, entry: _Entry, size: int) -> None:
        self._settled[entry.id] = size
        self._settled_bytes += size
        while len(self._settled) > KEPT_OUTCOMES or (self._settled_bytes > KEPT_BYTES and len(self._settled) > 1):
            self._forget_settled(self._entries[next(iter(self._settled))])

    def _forget_settled(self, entry: _Entry) -> None:
        size = self._settled.pop(entry.id, None)
        if size is not None:
            self._settled_bytes -= size
            self._drop(entry)

    def release_waiters(self) -> None:
        """The process is about to end: whoever waits hears now that there is no result yet, and so does who comes."""
        self._closing = True
        self.completions.release()
        for entry in self._entries.values():
            entry.wake()

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests in memory; waiters hear that they are gone. Returns their ids."""
        dropped = [e for e in self._entries.values() if e.session_id == session_id and e.outcome is None]
        for entry in dropped:
            self._drop(entry)
            entry.wake()
        self.completions.drop_session(session_id)
        return [entry.id for entry in dropped]

    async def fail_session(self, session_id: str) -> None:
        """Settle a closed session's pending requests in the database; where there is an engine, it does so."""
        pending = rows.futures.c.session_id == session_id
        await self._writer.transact(lambda c: rows.settle_where(c, pending, rows.SESSION_ENDED, time.time()))

    async def look(self, request_ids: Iterable[str]) -> None:
        """Read outcomes that the engine has written, and resolve who waits for them."""
        wanted = [request_id for request_id in request_ids if request_id in self._awaited]
        for start in range(0, len(wanted), 500):
            part = wanted[start : start + 500]
            for stored in await self._database.read_async(lambda c, ids=part: rows.find_settled(c, ids)):
                entry = self._entries.get(stored.id)
                if entry is not None and entry.outcome is None and stored.outcome is not None:
                    self._resolve(entry, stored.outcome, time.time())

    async def look_for_lost_rings(self) -> None:
        """Look for outcomes of everything that the engine still owes."""
        if self._awaited:
            owed = list(self._awaited)
            await self.look(await self._database.read_async(lambda c: rows.ended_among(c, owed)))

    @property
    def pending(self) -> int:
        return len(self._entries) - len(self._settled)


def _finder(key: Key) -> Callable[[Connection], StoredFuture | None]:
    kind, owner, seq_id = key
    if kind == "command":
        return lambda connection: rows.find_command(connection, owner, seq_id)
    return lambda connection: rows.find_sample(connection, owner, seq_id)
