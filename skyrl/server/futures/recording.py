"""Records requests. Each request is recorded once; a repeat gets the id of the first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from skyrl.base.types.requests import Kind, NewRequest, RequestKey, check_repeat, new_request_id
from skyrl.runtime.tracing import RequestTrace, current_trace
from skyrl.server.futures.entries import Entries, Entry
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Change, Connection, Database
from skyrl.storage.db.faults import ConstraintError
from skyrl.storage.db.futures import StoredFuture
from skyrl.storage.db.models import record_numbered
from skyrl.storage.db.writer import GroupCommitWriter

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
