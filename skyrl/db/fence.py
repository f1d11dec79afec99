"""The trainer's writes are refused once its server has lost the claim to the database.

A server that was stopped for long may have been replaced by another one. Its engine does not know that, and would write
results beside the new one's. So each of the engine's transactions first reads whose claim it is. Write transactions run
one at a time on both databases, and taking the claim is one of them: nobody takes it between that reading and the
commit. Knows the row of the claim; does not know what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from skyrl.db import engine_state
from skyrl.db.retrying_database import RetryingDatabase

T = TypeVar("T")


class Displaced(RuntimeError):
    """This server's claim to the database is another server's by now, or has been given up."""


class Fence:
    """Whether `server` holds the claim. Threads may share it.

    `on_loss` is called, on the thread that found out, each time the claim turns out to be lost.
    """

    def __init__(self, server: str, on_loss: Callable[[], object] = lambda: None) -> None:
        self._server = server
        self._on_loss = on_loss
        self.lost = False
        """Whether the claim was ever found to be lost. It is never taken again by the same process."""

    def holds(self, connection: Connection) -> bool:
        """Whether the claim is this server's, as this transaction sees it. Always False after it was lost once."""
        if not self.lost and engine_state.owner(connection) == self._server:
            return True
        self.lost = True
        self._on_loss()
        return False

    def check(self, connection: Connection) -> None:
        """Raises Displaced unless the claim is this server's."""
        if not self.holds(connection):
            raise Displaced(
                f"server {self._server} does not train on this database any more: another server has taken over since"
            )


class FencedDatabase(RetryingDatabase):
    """The engine's database. A write raises Displaced, and changes nothing, once the claim is lost."""

    def __init__(self, url: str, fence: Fence) -> None:
        super().__init__(url)
        self._fence = fence

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        def fenced(connection: Connection) -> T:
            self._fence.check(connection)
            return change(connection)

        return super().write(fenced, power_safe=power_safe)

    def confirm_claim(self) -> None:
        """For what no transaction covers, such as the deletion of a file. Raises Displaced."""
        self.read(self._fence.check)
