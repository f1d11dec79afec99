"""Notices from process to process over PostgreSQL's LISTEN and NOTIFY, each on a connection of its own.

A notice is lost when a connection breaks or nobody listens. Behind a proxy that shares connections between clients, all
notices are lost, because LISTEN does not work there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

CHANNEL = "skyrl"
MAX_PAYLOAD = 7_900
"""Bytes; PostgreSQL takes less than 8,000."""
MAX_UNSENT = 100_000
"""The most notices that wait for a connection. If there are more, all of them are dropped."""
RETRY_S = 1.0


class PostgresNotify:
    """Sends notices to the other processes of a database, and calls `on_notify` with the notices of another process."""

    def __init__(self, conninfo: str, process_id: str, on_notify: Callable[[list[str]], None]) -> None:
        """`conninfo` is a PostgreSQL URL as libpq reads it."""
        self._conninfo = conninfo
        self._process_id = process_id
        self._on_notify = on_notify
        self._unsent: dict[str, None] = {}
        self._has_unsent = asyncio.Event()

    def send(self, notices: Iterable[str]) -> None:
        """Queue notices; `run` sends them."""
        if len(self._unsent) > MAX_UNSENT:
            self._unsent.clear()
        self._unsent.update(dict.fromkeys(notices))
        self._has_unsent.set()

    async def run(self) -> None:
        """Listen and send until cancelled. A broken connection is replaced."""
        await asyncio.gather(
            self._with_connections("listening", self._listen), self._with_connections("sending", self._notify)
        )

    async def _with_connections(self, activity: str, work: Callable[[Any], Any]) -> None:
        """Run `work(connection)` again with a new connection each time one breaks. `activity` is for the log."""
        import psycopg

        broken = False
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                    if broken:
                        logger.info("%s to the other API processes goes on", activity)
                        broken = False
                    await work(connection)
            except (psycopg.Error, OSError) as error:
                if not broken:
                    message = " ".join(str(error).split())
                    logger.warning("%s to the other API processes is interrupted: %s", activity, message)
                broken = True
            await asyncio.sleep(RETRY_S)

    async def _listen(self, connection: Any) -> None:
        await connection.execute(f"LISTEN {CHANNEL}")
        async for notification in connection.notifies():
            sender, *notices = notification.payload.split("\n")
            if sender != self._process_id:
                self._on_notify(notices)

    async def _notify(self, connection: Any) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            notices, self._unsent = list(self._unsent), {}
            for payload in self._payloads(notices):
                await connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))

    def _payloads(self, notices: Iterable[str]) -> Iterator[str]:
        """The notices in lines, each payload after a first line with this process's id."""
        payload = self._process_id
        for notice in notices:
            if len(payload) + 1 + len(notice) > MAX_PAYLOAD:
                yield payload
                payload = self._process_id
            payload += f"\n{notice}"
        if payload != self._process_id:
            yield payload
