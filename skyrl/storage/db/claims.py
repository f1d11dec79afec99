"""The claim of one server to train on this database: the single row of the table training_claim.

If a server was suspended for long, another server may have taken its claim. The engine of the first server does not
know that, and would write results beside those of the new engine. Therefore each write transaction of an engine
(`FencedDatabase`) first reads the owner of the claim. Write transactions run one at a time, and taking the claim is
one, too. So no server takes the claim between that read and the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, insert, select, update

from skyrl.storage.db import engine_state
from skyrl.storage.db.repeats import RetryingDatabase
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


def owner(connection: Connection) -> str | None:
    """The server that has the claim to this database; None when no server has it."""
    return connection.execute(select(claims.c.owner).where(claims.c.id == 1)).scalar()


def release(connection: Connection, owner: str, reason: str) -> None:
    """Give up the claim of `owner`. Does nothing if another server has the claim."""
    if read_claim(connection).owner == owner:
        engine_state.clear_all(connection, reason)
        _set(connection, None, None)


def _set(connection: Connection, owner: str | None, held_at: float | None) -> None:
    if connection.execute(select(claims.c.id).where(claims.c.id == 1)).first() is None:
        connection.execute(insert(claims), {"id": 1})
    connection.execute(update(claims).where(claims.c.id == 1).values(owner=owner, held_at=held_at))


T = TypeVar("T")


class Displaced(RuntimeError):
    """Another server has the claim to the database now, or this server has given it up."""


class Fence:
    """Checks whether `server` has the claim. Safe for threads.

    `on_loss` is called on the checking thread each time the claim is found lost.
    """

    def __init__(self, server: str, on_loss: Callable[[], object] = lambda: None) -> None:
        self._server = server
        self._on_loss = on_loss
        self.lost = False
        """Whether the claim was found lost. The same process never takes it again."""

    def holds(self, connection: Connection) -> bool:
        """Whether this server has the claim. Always False after the claim was lost once."""
        if not self.lost and owner(connection) == self._server:
            return True
        self.lost = True
        self._on_loss()
        return False

    def check(self, connection: Connection) -> None:
        """Raises Displaced unless this server has the claim."""
        if not self.holds(connection):
            raise Displaced(
                f"server {self._server} does not train on this database any more: another server has taken over since"
            )


class FencedDatabase(RetryingDatabase):
    """The engine's database. Once the claim is lost, a write raises Displaced and changes nothing."""

    def __init__(self, url: str, fence: Fence) -> None:
        super().__init__(url)
        self._fence = fence

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        def fenced(connection: Connection) -> T:
            self._fence.check(connection)
            return change(connection)

        return super().write(fenced, power_safe=power_safe)

    def confirm_claim(self) -> None:
        """Check the claim before a change outside the database, such as the deletion of a file. Raises Displaced."""
        self.read(self._fence.check)
