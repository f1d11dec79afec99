"""Refuses the engine's writes once its server has lost the claim to the database.

If a server was suspended for long, another server may have taken its claim. The engine of the first server does not
know that, and would write results beside those of the new engine. Therefore each write transaction of an engine first
reads the owner of the claim. Write transactions run one at a time, and taking the claim is one, too. So no server takes
the claim between that read and the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from skyrl.storage.db import claims
from skyrl.storage.db.retrying_database import RetryingDatabase

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
        if not self.lost and claims.owner(connection) == self._server:
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
