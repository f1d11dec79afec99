"""Words from process to process over PostgreSQL: LISTEN and NOTIFY, on two connections of their own.

A notice may be lost (a connection broke, nobody listened): whoever hears also looks by itself now and then. Behind a
proxy that shares connections between clients LISTEN hears nothing, and everything is found by looking.
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
"""Words that wait for a connection; then they are given up."""
RETRY_S = 1.0


class PostgresNotify:
    """Tells the other processes of a database, and calls `on_notify` with the words that another one told."""

    def __init__(self, conninfo: str, me: str, on_notify: Callable[[list[str]], None]) -> None:
        """`conninfo` is a PostgreSQL URL as libpq reads it."""
        self._conninfo = conninfo
        self._me = me
        self._on_notify = on_notify
        self._unsent: dict[str, None] = {}
        self._something = asyncio.Event()

    def send(self, words: Iterable[str]) -> None:
        """Returns at once."""
        if len(self._unsent) > MAX_UNSENT:
            self._unsent.clear()
        self._unsent.update(dict.fromkeys(words))
        self._something.set()

    async def run(self) -> None:
        """Listen and send until cancelled, over new connections when one breaks."""
        await asyncio.gather(self._insist("listening", self._listen), self._insist("telling", self._notify))

    async def _insist(self, what: str, work: Callable[[Any], Any]) -> None:
        import psycopg

        broken = False
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                    if broken:
                        logger.info("%s to the other API processes goes on", what)
                        broken = False
                    await work(connection)
            except (psycopg.Error, OSError) as error:
                if not broken:
                    said = " ".join(str(error).split())
                    logger.warning("%s to the other API processes is interrupted: %s", what, said)
                broken = True
            await asyncio.sleep(RETRY_S)

    async def _listen(self, connection: Any) -> None:
        await connection.execute(f"LISTEN {CHANNEL}")
        async for notice in connection.notifies():
            sender, *words = notice.payload.split("\n")
            if sender != self._me:
                self._on_notify(words)

    async def _notify(self, connection: Any) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            words, self._unsent = list(self._unsent), {}
            for payload in self._payloads(words):
                await connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))

    def _payloads(self, words: Iterable[str]) -> Iterator[str]:
        payload = self._me
        for word in words:
            if len(payload) + 1 + len(word) > MAX_PAYLOAD:
                yield payload
                payload = self._me
            payload += f"\n{word}"
        if payload != self._me:
            yield payload
