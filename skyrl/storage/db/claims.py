"""The claim of one server to train on this database: the single row of the table training_claim.

If a server was suspended for long, another server may have taken its claim. The engine of the first server does not
know that, and would write results beside those of the new engine. Therefore each write transaction of an engine
(`FencedDatabase`) first reads the owner of the claim. Write transactions run one at a time, and taking the claim is
one, too. So no server takes the claim between that read and the commit.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from skyrl.storage.db import engine_state
from skyrl.storage.db.tables import TrainingClaimRow

claims = TrainingClaimRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Claim:
    """The server that trains on this database, when it renewed the claim, and the newest heartbeat of its engines (both
    in seconds since the epoch). While that server runs, one of the two changes every few seconds."""

    owner: str | None
    held_at: float | None
    heartbeat_at: float


def read_claim(connection: Connection) -> Claim:
    """The claim. Without an owner if there is no row."""
    row = connection.execute(select(claims).where(claims.c.id == 1)).first()
    heartbeat_at = engine_state.last_heartbeat(connection)
    return Claim(None, None, heartbeat_at) if row is None else Claim(row.owner, row.held_at, heartbeat_at)


def claim(connection: Connection, owner: str, seen: Claim, state_keys: Collection[str] = (engine_state.ONLY,)) -> bool:
    """Make `owner` the server that trains on this database. Returns False if another server has the claim and the claim
    is not equal to `seen`. If it is equal to `seen`, the caller has found that server dead, and `owner` takes over.

    `state_keys` are those of the server's base models; each then has a cleared row in engine_state."""
    now = read_claim(connection)
    if now.owner not in (None, owner) and now != seen:
        return False
    engine_state.keep_only(connection, state_keys, "the engine is starting")
    _set(connection, owner, time.time())
    return True


def hold(connection: Connection, owner: str) -> bool:
    """Renew the claim of `owner`. Returns False if another server has the claim."""
    renewal = update(claims).where(claims.c.owner == owner).values(held_at=time.time())
    return connection.execute(renewal).rowcount == 1


def release(connection: Connection, owner: str, reason: str) -> None:
    """Give up the claim of `owner`. Does nothing if another server has the claim."""
    if read_claim(connection).owner == owner:
        engine_state.clear_all(connection, reason)
        _set(connection, None, None)


def _set(connection: Connection, owner: str | None, held_at: float | None) -> None:
    if connection.execute(select(claims.c.id).where(claims.c.id == 1)).first() is None:
        connection.execute(insert(claims), {"id": 1})
    connection.execute(update(claims).where(claims.c.id == 1).values(owner=owner, held_at=held_at))
