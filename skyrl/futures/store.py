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
from sqlalchemy.exc import IntegrityError

from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.db.futures import Outcome, StoredFuture
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.completions import Completion, CompletionLogs, Target, block_of, clone_of
from skyrl.futures.ids import new_request_id
from skyrl.futures.kinds import Kind
from skyrl.wire.errors import RequestError

logger = logging.getLogger(__name__)

Key = tuple[str, str, int]
"""("command", model_id, seq_id) or ("sample", sampling_session_id, seq_id): who repeats it gets the same request."""

KEPT_OUTCOMES = 20_000
KEPT_BYTES = 256 * 2**20
"""Outcomes kept in memory after they were settled; older ones are read from the database."""

SAFETY_POLL_S = 1.0
"""How often pending engine requests are looked up in case a ring was lost; not at all while none is pending."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to record. `body` is stored as the bytes that arrived. `identity` is what a repeat has in common with
    the first, the body when None."""

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

    @property
    def target(self) -> Target | None:
        return _target(self.session_id, self.sampling_session_id, self.sample_seq_id)

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


def _completion(request_id: str, outcome: Outcome) -> Completion:
    return Completion(request_id, None if outcome.error is not None else len(outcome.result), time.time())


def _target(session_id: str, sampling_session_id: str | None, seq_id: int | None) -> Target | None:
    return None if sampling_session_id is None else Target(session_id, sampling_session_id, clone_of(seq_id))


class _Entry:
    __slots__ = ("digest", "id", "key", "kind", "outcome", "recorded", "session_id", "settled", "target", "tenant")

    def __init__(
        self,
        request_id: str,
        kind: str,
        tenant: str,
        session_id: str,
        digest: bytes,
        key: Key | None,
        target: Target | None = None,
    ) -> None:
        self.id = request_id
        self.kind = kind
        self.tenant = tenant
        self.session_id = session_id
        self.digest = digest
        self.key = key
        self.target = target
        self.outcome: Outcome | None = None
        self.settled = asyncio.Event()
        self.recorded: asyncio.Event | None = None


class FutureStore:
    """All requests of one API process."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[Key, _Entry] = {}
        self._settled: OrderedDict[str, int] = OrderedDict()
        self._settled_bytes = 0
        self._closing = False
        self._awaited: set[str] = set()
        """Pending requests that another process settles."""
        self.completions = CompletionLogs(self._ends_of)

    async def record(self, request: NewRequest) -> tuple[str, bool]:
        """Store a request durably; returns its id and whether it is new. A repeat returns the first one's id.

        Raises RequestError when the key was used before with another body.
        """
        key, digest = request.key, request.digest()
        while key is not None and (known := self._by_key.get(key)) is not None:
            if known.recorded is None:
                return self._same(known.id, known.digest, digest, key), False
            await known.recorded.wait()  # and look again: it may have failed, and it is then for us to try
        entry = _Entry(new_request_id(), request.kind, request.tenant, request.session_id, digest, key, request.target)
        recorded = entry.recorded = asyncio.Event()
        self._add(entry, awaited=request.kind != Kind.EXTERNAL)
        try:
            await self._writer.execute(rows.RECORD, self._parameters(entry, request))
        except BaseException as error:
            self._drop(entry)
            if not isinstance(error, IntegrityError) or key is None:
                raise
            stored = await self._database.read_async(_finder(key))
            if stored is None:
                raise
            return self._same(stored.id, stored.digest, digest, key), False
        finally:
            entry.recorded = None
            recorded.set()
        if entry.id not in self._entries:
            # Its session was closed while it was written, so that it may have missed the settling of all the others.
            await self._writer.execute(rows.SETTLE, rows.settlement(entry.id, rows.SESSION_ENDED, time.time()))
            return entry.id, False
        return entry.id, True

    @staticmethod
    def _same(request_id: str, recorded: bytes, repeated: bytes, key: Key) -> str:
        if recorded != repeated:
            field = "model_seq_id" if key[0] == "command" and key[2] == 0 else "seq_id"
            raise RequestError(f"{key[2]} was used before for {key[1]} with another body", field=field)
        return request_id

    @staticmethod
    def _parameters(entry: _Entry, request: NewRequest) -> dict[str, object]:
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
        target = _target(session_id, key[1], key[2]) if key is not None and key[0] == "sample" else None
        entry = _Entry(request_id, kind, tenant, session_id, digest, key, target)
        self._add(entry, awaited=kind != Kind.EXTERNAL)

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """The outcome, or None when there is none after `timeout_s`.

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
        if entry.outcome is None:
            if self._closing:
                return None
            try:
                async with asyncio.timeout(timeout_s):
                    await entry.settled.wait()
            except TimeoutError:
                return None
        if entry.outcome is None:
            if self._closing:
                return None
            raise KeyError(request_id)
        return entry.outcome

    def _await_stored(self, stored: Any) -> _Entry:
        """Wait for a pending row, whatever its kind: a sample that is not forwarded here is the engine's to settle."""
        target = _target(stored.session_id, stored.sampling_session_id, stored.sample_seq_id)
        entry = _Entry(stored.id, stored.kind, stored.tenant, stored.session_id, stored.digest, None, target)
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
        """Whether it is known in memory and has no outcome."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.outcome is None

    async def end(self, request_id: str, outcome: Outcome) -> bool:
        """Settle a pending request that is nobody's in this process, or is not to be waited for. False if it had ended:
        the first outcome stays."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.kind == Kind.EXTERNAL:
            if entry.outcome is not None:
                return False
            await self.settle(request_id, outcome)
            return True
        this = rows.futures.c.id == request_id
        ended = await self._writer.transact(lambda c: rows.settle_where(c, this, outcome, time.time()))
        await self.look([request_id])
        return bool(ended)

    async def _ends_of(self, target: Target, since: float) -> list[Completion]:
        """A sampling client's ends since then, in their order; what it still waits for is waited for from now on."""
        unwritten = [
            entry for entry in self._entries.values() if entry.target == target and entry.id not in self._settled
        ]
        ended = {entry.id: _completion(entry.id, entry.outcome) for entry in unwritten if entry.outcome is not None}
        stored = await self._database.read_async(
            lambda c: rows.of_sampler(c, target.sampling_session_id, *block_of(target.clone), since)
        )
        for row in stored:
            if row.status != "pending":
                size = None if row.status == "failed" else row.size or 0
                ended[row.id] = Completion(row.id, size, row.completed_at)
            elif (entry := self._entries.get(row.id)) is None:
                self._await_stored(row)
            elif entry.outcome is not None:  # and could not be written
                ended[row.id] = _completion(row.id, entry.outcome)
        return sorted(ended.values(), key=lambda end: end.at)

    def forget_retrieved(self, request_ids: Iterable[str], tenant: str) -> None:
        """The client has these results: they need not be kept in memory. It may still read them again."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if (
                entry is not None
                and entry.tenant == tenant
                and (size := self._settled.pop(request_id, None)) is not None
            ):
                self._settled_bytes -= size
                self._drop(entry)

    async def settle(self, request_id: str, outcome: Outcome) -> None:
        """Resolve a forwarded sample: whoever waits hears at once, the row follows; returns when the row is durable.

        A request that was dropped meanwhile is logged and ignored.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.outcome is not None:
            logger.info("request %s ended after it was dropped; its result is discarded", request_id)
            return
        self._resolve(entry, outcome)
        try:
            await self._writer.execute(rows.SETTLE_SAMPLE, rows.settlement(request_id, outcome, time.time()))
        finally:
            self._make_evictable(entry, outcome)  # not before: whoever asks meanwhile would find a pending row

    def _resolve(self, entry: _Entry, outcome: Outcome) -> None:
        entry.outcome = outcome
        entry.settled.set()
        if entry.target is not None:
            self.completions.note(entry.target, _completion(entry.id, outcome))
        self._awaited.discard(entry.id)

    def _make_evictable(self, entry: _Entry, outcome: Outcome) -> None:
        self._settled[entry.id] = len(outcome.result)
        self._settled_bytes += len(outcome.result)
        while len(self._settled) > KEPT_OUTCOMES or (self._settled_bytes > KEPT_BYTES and len(self._settled) > 1):
            old, size = self._settled.popitem(last=False)
            self._settled_bytes -= size
            if (evicted := self._entries.get(old)) is not None:
                self._drop(evicted)

    def release_waiters(self) -> None:
        """The process is about to end: whoever waits hears now that there is no result yet, and so does who comes."""
        self._closing = True
        self.completions.release()
        for entry in self._entries.values():
            if entry.outcome is None:
                entry.settled.set()

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests in memory; waiters hear that they are gone. Returns their ids."""
        dropped = [e for e in self._entries.values() if e.session_id == session_id and e.outcome is None]
        for entry in dropped:
            self._drop(entry)
            entry.settled.set()
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
                    self._resolve(entry, stored.outcome)
                    self._make_evictable(entry, stored.outcome)

    async def look_for_lost_rings(self) -> None:
        """Look for outcomes of everything that the engine still owes."""
        if self._awaited:
            await self.look(list(self._awaited))

    @property
    def pending(self) -> int:
        return len(self._entries) - len(self._settled)


def _finder(key: Key) -> Callable[[Connection], StoredFuture | None]:
    kind, owner, seq_id = key
    if kind == "command":
        return lambda connection: rows.find_command(connection, owner, seq_id)
    return lambda connection: rows.find_sample(connection, owner, seq_id)
