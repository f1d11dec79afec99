"""Uses of adapter versions by requests that have no row of their own: OpenAI requests.

The engine keeps a version that is used here, even if the checkpoint behind it is deleted or saved anew while a request
runs. One row holds a version for HOLD_S, for all requests of all API processes. So a busy version costs one small
transaction every few minutes, and the use of a killed process ends by itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from sqlalchemy import Connection, delete, text

from skyrl.base.types.weights import AdapterVersion, WeightsRef
from skyrl.storage.db.tables.checkpoints import AdapterUseRow
from skyrl.storage.db.writer import GroupCommitWriter

uses = AdapterUseRow.__table__  # type: ignore[attr-defined]

HOLD_S = 600.0
"""How long a row holds its version. The clocks of the processes may differ by minutes."""
RENEW_BEFORE_S = 300.0
"""A row that ends sooner is written again by the next request. `renew` does it for running requests."""

_HOLD = text(
    "INSERT INTO adapter_uses (weights, used_until) VALUES (:weights, :until) "
    "ON CONFLICT (weights) DO UPDATE SET used_until = excluded.used_until"
)


def _hold(connection: Connection, versions: Collection[AdapterVersion], until: float) -> None:
    """Rows in a fixed order, so that two processes cannot deadlock."""
    rows = [{"weights": name, "until": until} for name in sorted(map(str, versions))]
    if rows:
        connection.execute(_HOLD, rows)


class AdapterUses:
    """The uses of this process."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer
        self._running: Counter[AdapterVersion] = Counter()
        self._held_until: dict[AdapterVersion, float] = {}

    @asynccontextmanager
    async def using(self, weights: WeightsRef) -> AsyncIterator[None]:
        """Hold a version for as long as the block runs. Other weights need no hold.

        The caller has found the version's checkpoint just before. The engine waits `reclaim.GRACE_S` between unloading
        a version and deleting its files, and looks for uses again before it deletes them. So a checkpoint that is
        deleted between that look-up and this hold does no harm.
        """
        if not isinstance(weights, AdapterVersion):
            yield
            return
        self._running[weights] += 1
        try:
            if self._held_until.get(weights, 0.0) < time.time() + RENEW_BEFORE_S:
                await self._write([weights])
            yield
        finally:
            self._running[weights] -= 1
            if not self._running[weights]:
                del self._running[weights]

    async def renew(self) -> None:
        """Hold the versions of running requests for longer, and forget ended uses. Call it about once a minute."""
        now = time.time()
        self._held_until = {weights: until for weights, until in self._held_until.items() if until > now}
        ending = [w for w in self._running if self._held_until.get(w, 0.0) < now + RENEW_BEFORE_S]
        if ending:
            await self._write(ending)

    async def _write(self, versions: Collection[AdapterVersion]) -> None:
        now = time.time()

        def write(connection: Connection) -> None:
            connection.execute(delete(uses).where(uses.c.used_until < now - HOLD_S))
            _hold(connection, versions, now + HOLD_S)

        await self._writer.transact(write)
        self._held_until |= dict.fromkeys(versions, now + HOLD_S)
