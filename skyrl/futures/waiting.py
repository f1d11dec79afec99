"""Waiting for the outcome of a request: in memory while it is pending, from the database when it is not in memory."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.db.futures import Outcome, StoredFuture
from skyrl.futures.entries import Entries, Entry
from skyrl.types.kinds import Kind


class Waiting:
    """Those who wait in one API process, whichever process settles what they wait for."""

    def __init__(self, database: Database, entries: Entries) -> None:
        self._database = database
        self._entries = entries
        self._closing = False

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """The outcome, or None when there is none after `timeout_s`. An outcome that is returned is stored, so whoever
        asks again gets the same, and it need not stay in memory.

        Raises KeyError when no such request is stored, or it is another tenant's.
        """
        entry = self._entries.by_id.get(request_id)
        if entry is None:
            stored = await self._database.read_async(lambda connection: rows.find(connection, request_id))
            if stored is None or stored.tenant != tenant:
                raise KeyError(request_id)
            if stored.outcome is not None:
                return stored.outcome
            entry = self._entries.by_id.get(request_id) or self._await_stored(stored)
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
        """Wait for a pending row that is not in memory. Another process settles it, whatever its kind: the samples that
        this process forwards are in memory."""
        sampling = stored.sampling_session_id
        sampler = None if sampling is None else (sampling, stored.sample_seq_id)
        entry = Entry(stored.id, stored.kind, stored.tenant, stored.session_id, stored.digest, None, sampler)
        self._entries.add(entry, owned_elsewhere=True)
        return entry

    def wait_for(self, pending: Sequence[StoredFuture]) -> None:
        """Hear of the ends of these pending rows from now on."""
        for stored in pending:
            if stored.id not in self._entries.by_id:
                self._await_stored(stored)

    async def kind_of(self, request_id: str, tenant: str) -> Kind:
        """Raises KeyError when no such request is stored, or it is another tenant's."""
        known = self._entries.by_id.get(request_id)
        known = known or await self._database.read_async(lambda connection: rows.find(connection, request_id))
        if known is None or known.tenant != tenant:
            raise KeyError(request_id)
        return Kind(known.kind)

    def release(self) -> None:
        """The process is about to end: those who wait are told now that there is no outcome yet, as are those who
        come."""
        self._closing = True
        self._entries.wake_all()
