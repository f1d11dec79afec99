"""Settles requests: stores the outcome, then tells it to those who wait for it, here and in other processes.

`settle` gets the outcomes of samples that this process forwards. Outcomes that other processes have stored are read
from the database: as soon as a notice of them arrives, and every second in case a notice was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from skyrl.base.types.requests import Kind
from skyrl.base.wire.errors import ErrorCategory
from skyrl.runtime.processes.backoff import Backoff
from skyrl.runtime.processes.logs import LimitedLog, plain
from skyrl.server.futures.entries import Entries, Entry
from skyrl.server.futures.stored_ends import StoredEnds
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError, is_transient, reason
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.notices import PeerNotifier

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0
"""The pauses between tries to store an outcome."""


class Settling:
    """Settles the requests of one API process. `peers` tells the other API processes of each."""

    def __init__(
        self, database: Database, writer: GroupCommitWriter, entries: Entries, ends: StoredEnds, peers: PeerNotifier
    ) -> None:
        self._database = database
        self._writer = writer
        self._entries = entries
        self._ends = ends
        self._peers = peers
        self._failures = LimitedLog(logger)

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
        if len(self._ends) and (target := entry.target) is not None:
            self._ends.ended(target)

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
        """See `FutureStore.end`."""
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

    async def fail_session(self, session_id: str) -> None:
        """See `FutureStore.fail_session`."""
        await self._writer.transact(
            lambda c: rows.end_requests_of_sessions(c, [session_id], time.time(), Kind.EXTERNAL)
        )

    async def read_outcomes(self, request_ids: Iterable[str]) -> list[str]:
        """See `FutureStore.read_outcomes`."""
        pending_ids = [request_id for request_id in request_ids if self._entries.is_pending(request_id)]
        forwarded: list[str] = []
        for start in range(0, len(pending_ids), rows.MAX_NAMED):
            some_ids = pending_ids[start : start + rows.MAX_NAMED]
            for stored in await self._database.read_async(lambda c, ids=some_ids: rows.find_settled(c, ids)):
                entry = self._entries.by_id.get(stored.id)
                if entry is None or not entry.pending or stored.outcome is None:
                    continue
                if self._entries.is_own(entry.id):
                    forwarded.append(entry.id)
                self._tell(entry, stored.outcome)
        return forwarded

    async def poll_outcomes(self) -> None:
        """See `FutureStore.poll_outcomes`."""
        if self._entries.owned_elsewhere:
            ids = list(self._entries.owned_elsewhere)
            await self.read_outcomes(await self._database.read_async(lambda c: rows.ended_among(c, ids)))
