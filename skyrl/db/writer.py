"""The group-commit writer: one thread owns the write connection and commits whatever is waiting in one transaction.

Knows statements and parameters; does not know what a future or a session is. A write is acknowledged (its awaitable
resolves) only after the commit that holds it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable

from skyrl.db.database import Database

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BATCH = 1_000
"""Writes per transaction; keeps the lock's hold time, and so the engine's wait for it, short."""


class _Write:
    __slots__ = ("change", "loop", "parameters", "result", "statement", "waiter")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        statement: Executable | None,
        parameters: dict[str, Any] | None,
        change: Callable[[Connection], Any] | None,
    ) -> None:
        self.loop = loop
        self.statement = statement
        self.parameters = parameters
        self.change = change
        self.result: Any = None
        self.waiter: asyncio.Future[Any] = loop.create_future()


class GroupCommitWriter:
    """Writes from one event loop, committed in groups by one thread.

    Statements of one group that are the same object run as one executemany, in order of their first appearance; so a
    write that depends on another must wait for it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
        self._closed = False
        self.commits = 0
        self._thread.start()

    async def execute(self, statement: Executable, parameters: dict[str, Any]) -> None:
        """Run one prepared statement; returns when it is committed. Raises what the database raised."""
        await self._put(_Write(asyncio.get_running_loop(), statement, parameters, None))

    async def transact(self, change: Callable[[Connection], T]) -> T:
        """Run `change(connection)` inside a transaction of its own group; returns its value once committed."""
        return await self._put(_Write(asyncio.get_running_loop(), None, None, change))

    async def _put(self, write: _Write) -> Any:
        if self._closed:
            raise RuntimeError("the writer is closed; nothing would commit this write")
        self._queue.put(write)
        return await write.waiter

    async def close(self) -> None:
        """Commit what is waiting, then end the thread. Later writes raise RuntimeError."""
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, last = [first], False
            while len(batch) < MAX_BATCH:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    last = True
                    break
                batch.append(item)
            self._commit(batch)
            if last:
                return

    def _commit(self, batch: list[_Write]) -> None:
        begun = False
        try:
            with self._database.writer.begin() as connection:
                begun = True
                self._apply(connection, batch)
        except Exception as error:
            if len(batch) == 1 or not begun:  # without the lock, each alone would only wait for it again
                self._resolve(batch, error)
                return
            # One bad write must not fail its neighbours: the group was rolled back, so run each alone.
            for write in batch:
                self._commit([write])
            return
        self.commits += 1
        self._resolve(batch, None)

    @staticmethod
    def _apply(connection: Connection, batch: list[_Write]) -> None:
        grouped: dict[int, list[_Write]] = {}
        for write in batch:
            key = id(write.statement) if write.statement is not None else id(write)
            grouped.setdefault(key, []).append(write)
        for writes in grouped.values():
            head = writes[0]
            if head.change is not None:
                head.result = head.change(connection)
            elif head.statement is not None:
                connection.execute(head.statement, [write.parameters or {} for write in writes])

    @staticmethod
    def _resolve(batch: list[_Write], error: Exception | None) -> None:
        def settle(writes: list[_Write]) -> None:
            for write in writes:
                if write.waiter.done():
                    continue
                if error is not None:
                    write.waiter.set_exception(error)
                else:
                    write.waiter.set_result(write.result)

        try:
            batch[0].loop.call_soon_threadsafe(settle, batch)
        except RuntimeError:
            logger.warning("%d writes were committed after their event loop had closed", len(batch))
