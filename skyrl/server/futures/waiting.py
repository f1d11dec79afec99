"""Waits for outcomes of requests: in memory while a request is pending, else in the database."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.base.types.requests import Kind
from skyrl.server.futures.entries import Entries, Entry
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome, StoredFuture


class Waiting:
    """Waits in one API process for outcomes, whichever process settles the requests."""

    def __init__(self, database: Database, entries: Entries) -> None:
        self._database = database
        self._entries = entries
        self._closing = False

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """See `FutureStore.wait`. A returned outcome is removed from memory; the database still has it."""
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

    def release(self) -> None:
        """Answer at once all that wait, and all that come, that there is no outcome yet: the process is about to
        end."""
        self._closing = True
        self._entries.wake_all()
