"""Rows in the memory of an API process: rows that are read by id, many with one query; rows that are dropped together
with their session; and all API keys.

A query for rows begins after all its ids were asked for, so it finds what was committed before.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import bindparam, select, update

from skyrl.storage.db.database import MAX_NAMED, Database
from skyrl.storage.db.keys import ID, ApiKey, api_keys, digest_of, key_of, revoke, unrevoked
from skyrl.storage.db.writer import GroupCommitWriter

Row = TypeVar("Row")


class BatchedRows(Generic[Row]):
    """`read` returns the rows of at most MAX_NAMED ids, by id, without those that do not exist. One query runs at a
    time. After a start, the first requests of thousands of sessions come at once; a query and a thread for each cost
    more than all else that these requests do."""

    def __init__(self, read: Callable[[list[str]], Awaitable[dict[str, Row]]]) -> None:
        self._read = read
        self._open: dict[str, None] | None = None
        """The ids of the next query; None if nobody waits for it."""
        self._newest: asyncio.Task[dict[str, Row]] | None = None
        """The query of `_open`, or else the last one that has begun; None if that has ended."""

    async def get(self, row_id: str) -> Row | None:
        """The row; None if there is none. Raises what `read` raises for the query with this id."""
        if self._open is None or len(self._open) >= MAX_NAMED:
            self._open = {row_id: None}
            self._newest = asyncio.create_task(self._run(self._open, self._newest))
            self._newest.add_done_callback(self._ended)
        else:
            self._open[row_id] = None
        assert self._newest is not None
        rows = await asyncio.shield(self._newest)  # the caller may go away while others wait for the same query
        return rows.get(row_id)

    async def _run(self, ids: dict[str, None], before: asyncio.Task[Any] | None) -> dict[str, Row]:
        if before is not None:
            await asyncio.wait([before])
        if self._open is ids:
            self._open = None
        return await self._read(list(ids))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if self._newest is task:
            self._newest = None
        if not task.cancelled():
            task.exception()  # if all waiters have gone, nobody else reads it, and asyncio would log that


class _OfSession(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def session_id(self) -> str: ...


T = TypeVar("T", bound=_OfSession)


MOST_KEPT = 50_000
"""The most objects of a `SessionCache`: some 30 MB. A tenant may have 100,000 sampling sessions in one session."""


class SessionCache(Generic[T]):
    """To drop a session's objects takes time for these objects alone: 100,000 sessions may end within a minute, and a
    search among 100,000 objects for each would keep the event loop busy for minutes. Beyond MOST_KEPT, the object that
    was kept first is dropped: whoever needs it reads its row again."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, T] = OrderedDict()
        """The first of a dict is found behind the places of all that were dropped before it: 65 µs at this size."""
        self._ids_of: dict[str, set[str]] = {}
        """The ids of objects by session."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, object_id: str) -> T | None:
        return self._by_id.get(object_id)

    def keep(self, each: T) -> None:
        self._by_id[each.id] = each
        self._ids_of.setdefault(each.session_id, set()).add(each.id)
        if len(self._by_id) > MOST_KEPT:
            self.drop(next(iter(self._by_id)))

    def drop(self, object_id: str) -> None:
        """Drop an object, if it is there."""
        if (each := self._by_id.pop(object_id, None)) is None:
            return
        ids = self._ids_of[each.session_id]
        ids.remove(object_id)
        if not ids:
            del self._ids_of[each.session_id]

    def drop_session(self, session_id: str) -> None:
        for object_id in self._ids_of.pop(session_id, ()):
            del self._by_id[object_id]


MINUTE_S = 60
EXPIRED_S = 30 * 86_400
"""For so long a key is known after it has expired, so that its user is told why it is refused."""


class Keys:
    """All keys that are neither revoked nor long expired, in memory: finding a key reads no database.

    The next `refresh` finds the changes of other processes. When the database cannot be read, the keys that were read
    last stay valid.
    """

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._held: dict[str, ApiKey] = {}
        self._used: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def refresh(self) -> None:
        """Read the keys from the database again."""
        query = select(api_keys).where(unrevoked(time.time() - EXPIRED_S))
        rows = await self._database.read_async(lambda connection: list(connection.execute(query)))
        self._held = {row.id: key_of(row) for row in rows}

    def find(self, text: str) -> ApiKey | None:
        """The key with this text, expired or not. Compares digests in constant time."""
        key = self._held.get(text[ID])
        return key if key is not None and hmac.compare_digest(digest_of(text), key.digest) else None

    def with_id(self, key_id: str) -> ApiKey | None:
        """The key with this id, expired or not."""
        return self._held.get(key_id)

    def use(self, key: ApiKey) -> None:
        """Note that the key was used now. `note_uses` writes it."""
        self._used[key.id] = time.time() // MINUTE_S * MINUTE_S

    async def note_uses(self) -> None:
        """Write the minute of the last use of each key that was used since the last call."""
        if not self._used:
            return
        used, self._used = self._used, {}
        values = [{"key": key_id, "at": at} for key_id, at in used.items()]
        # Another process may have written a later use.
        earlier = api_keys.c.last_used_at.is_(None) | (api_keys.c.last_used_at < bindparam("at"))
        change = update(api_keys).where(api_keys.c.id == bindparam("key"), earlier).values(last_used_at=bindparam("at"))
        await self._writer.transact(lambda connection: connection.execute(change, values))

    async def revoke(self, key_id: str) -> None:
        """Revoke a key. This process refuses it at once, other processes after their next `refresh`."""
        await self._writer.transact(lambda connection: revoke(connection, key_id))
        self._held.pop(key_id, None)
