"""Writing requests and outcomes to the database: small ones with their group, large ones beside it.

Knows rows; does not know who waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.db.faults import is_transient, reason
from skyrl.db.futures import Outcome, StoredFuture
from skyrl.db.models import record_numbered
from skyrl.db.writer import GroupCommitWriter
from skyrl.processes.backoff import Backoff
from skyrl.types.requests import NewRequest, RequestKey
from skyrl.wire.errors import ErrorCategory

logger = logging.getLogger(__name__)

LARGE_BODY_BYTES = 256 * 2**10
"""Bodies beyond are hashed and written beside the event loop and the group commit, not by them."""

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0
"""How long a result waits between two tries to store it."""


class Recorder:
    """Writes the rows of one API process, which is the `owner` of what it forwards."""

    def __init__(self, database: Database, writer: GroupCommitWriter, owner: str | None) -> None:
        self._database = database
        self._writer = writer
        self._owner = owner
        self._large = asyncio.Lock()

    async def insert(self, request_id: str, digest: bytes, request: NewRequest, *, large: bool) -> None:
        """Returns when the row is durable. Raises IntegrityError when there is one with this key, and what
        `request.first` raises."""
        parameters = self._parameters(request_id, digest, request)
        if not large and not request.numbered and request.first is None:
            await self._writer.execute(rows.RECORD, parameters)
            return

        def insert(connection: Connection) -> None:
            if request.first is not None:
                request.first(connection)
            if request.numbered:
                record_numbered(connection, parameters)
            else:
                connection.execute(rows.RECORD.statement, parameters)

        if not large:
            await self._writer.transact(insert)
            return
        async with self._large:  # one at a time, in transactions of their own: small writes, in groups, go in between
            await asyncio.to_thread(self._database.write, insert)

    async def find(self, key: RequestKey) -> StoredFuture | None:
        """What was recorded under this key, by whichever process."""
        kind, owner, seq_id = key
        find = rows.find_command if kind == "command" else rows.find_sample
        return await self._database.read_async(lambda connection: find(connection, owner, seq_id))

    def _parameters(self, request_id: str, digest: bytes, request: NewRequest) -> dict[str, Any]:
        return {
            "id": request_id,
            "kind": request.kind,
            "tenant": request.tenant,
            "session_id": request.session_id,
            "model_id": request.model_id,
            "seq_id": request.seq_id,
            "sampling_session_id": request.sampling_session_id,
            "sample_seq_id": request.sample_seq_id,
            "digest": digest,
            "body": request.body,
            "body_format": request.body_format,
            "status": "pending",
            "created_at": time.time(),
            "owner": self._owner,
            "not_before": request.not_before,
        }


async def store_outcome(
    database: Database, writer: GroupCommitWriter, request_id: str, outcome: Outcome, now: float
) -> Outcome:
    """A sample has ended: what is stored of it, once it is. That is the row's own outcome if it has ended otherwise
    meanwhile, with its session or in another process; and a failure in place of what the database will never take."""
    backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S)
    while True:
        try:
            changed = await writer.execute(rows.SETTLE_SAMPLE, rows.settlement(request_id, outcome, now))
            if changed:
                return outcome
            stored = await database.read_async(lambda connection: rows.find(connection, request_id))
            return outcome if stored is None or stored.outcome is None else stored.outcome
        except DBAPIError as error:
            if not is_transient(error):
                if outcome.error is not None:
                    raise
                logger.error("the result of request %s cannot be stored: %s", request_id, reason(error))
                outcome = Outcome(error="the result cannot be stored", error_category=ErrorCategory.SERVER)
                continue
            retry_s = backoff.pause()
            logger.error("a result cannot be stored, tried again in %g s: %s", retry_s, reason(error))
            await asyncio.sleep(retry_s)
