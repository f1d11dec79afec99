"""Notices from process to process that something in the database has changed.

A notice is an id or one of two fixed words. It says only what to read; the facts are in the database. A notice may be
lost (the receiver does not run, a buffer is full, a connection broke). Therefore every receiver also reads the database
at regular times, and a lost notice only costs the time until then.

Between the processes of one server, over doorbells (`skyrl.storage.doorbell`: datagram sockets on one machine):

- An API process rings the engine without a notice for new commands, and with `SESSIONS` when a session has ended.
- The engine sends each API process the ids of requests that it has settled. The API process then reads their outcomes.
- The engine sends `STATE` when its own state has changed. The API process then reads that state.

Between the API processes of one database, over PostgreSQL's LISTEN and NOTIFY. On SQLite there is only one process. A
proxy that shares connections between clients loses all of these notices, because LISTEN does not work there:

- ids of requests that have ended: the other processes read their outcomes and stop forwarding them;
- ids of sampling sessions in which a sample has ended: the other processes read the new ends for waiting polls;
- ids of sessions that have ended or changed: the other processes read those sessions.

An API process has one `Notifier` for all of this. These constants say how often each receiver reads the database:
`skyrl.engine.loop.SAFETY_POLL_S` in the engine; in an API process `skyrl.storage.futures.store.SAFETY_POLL_S` for
requests, `skyrl.storage.futures.completion_feed.SAFETY_READ_S` for polls, `skyrl.api.served.POLL_S` for the engine's
state, and `skyrl.api.server.SESSION_CHECK_S` for sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl.storage.doorbell import Doorbell, DoorbellListener

AGENT = "agent-"
APART_S = 0.02
"""The least time between two sends. Every send wakes every other process, and costs it as much as many ids do. A
process reads new ends no more often either (`skyrl.storage.futures.completion_feed`)."""


@dataclass(slots=True)
class PeerNotices:
    """Notices of another API process: ids of `requests` that have ended, of the `sampling_sessions` of such requests,
    of `sessions` that have ended or changed, and of `agent_sessions` that have ended."""

    requests: list[str] = field(default_factory=list)
    sampling_sessions: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    agent_sessions: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, notices: Iterable[str]) -> PeerNotices:
        """The ids by what they stand for. The id of a sampling session contains a colon, the id of a session begins
        with s, AGENT stands before that of an agent session, and the id of a request has none of these."""
        sorted_notices = cls()
        for notice in notices:
            if ":" in notice:
                sorted_notices.sampling_sessions.append(notice)
            elif notice.startswith(AGENT):
                sorted_notices.agent_sessions.append(notice.removeprefix(AGENT))
            elif notice.startswith("s"):
                sorted_notices.sessions.append(notice)
            else:
                sorted_notices.requests.append(notice)
        return sorted_notices


class PeerNotifier:
    """Sends notices to the other API processes. `living` has the ids of those that live; while it is empty, nothing is
    sent. The first notice after a pause is sent in this turn of the event loop; later ones wait, and are sent together,
    until APART_S have passed since the last send."""

    def __init__(self) -> None:
        self.living: frozenset[str] = frozenset()
        self.send: Callable[[list[str]], None] | None = None
        self._unsent: dict[str, None] = {}
        self._sent_at = float("-inf")

    @property
    def alone(self) -> bool:
        return not self.living

    def request_ended(self, request_id: str, sampling_session_id: str | None = None) -> None:
        """A request has ended in this process. For a sample give its sampling session."""
        self._add((request_id,) if sampling_session_id is None else (request_id, sampling_session_id))

    def session_changed(self, session_id: str) -> None:
        """A session has ended or changed in this process."""
        self._add((session_id,))

    def agent_session_ended(self, session_id: str) -> None:
        """An agent session was ended in this process."""
        self._add((AGENT + session_id,))

    def _add(self, notices: Iterable[str]) -> None:
        if self.alone or self.send is None:
            return
        if not self._unsent:
            loop = asyncio.get_running_loop()
            if (due := self._sent_at + APART_S) > loop.time():
                loop.call_at(due, self._send_all)
            else:
                loop.call_soon(self._send_all)
        self._unsent.update(dict.fromkeys(notices))

    def _send_all(self) -> None:
        notices, self._unsent = list(self._unsent), {}
        self._sent_at = asyncio.get_running_loop().time()
        if self.send is not None and notices:
            self.send(notices)


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


FromEngine = Callable[[list[str]], Coroutine[object, object, None]]
FromPeers = Callable[[PeerNotices], Coroutine[object, object, None]]


class Notifier:
    """`engine` rings the engines of this server. `peers` sends notices to the other API processes of the database, as
    from the process `process_id`. Without `postgres_conninfo` there are no other API processes (SQLite)."""

    def __init__(
        self, process_id: str, *, own_doorbell: Path, engine_doorbells: Sequence[Path], postgres_conninfo: str | None
    ) -> None:
        self.engine = Doorbell(*engine_doorbells)
        self.peers = PeerNotifier()
        self._process_id = process_id
        self._own_doorbell = own_doorbell
        self._postgres_conninfo = postgres_conninfo
        self._listener: DoorbellListener | None = None
        self._postgres: PostgresNotify | None = None
        self._reactions: set[asyncio.Task[None]] = set()

    def listen(self, from_engine: FromEngine, from_peers: FromPeers) -> None:
        """Receive notices of the engine from now on, and of the other API processes while `run` runs. `from_engine` or
        `from_peers` is called with them in a task."""
        self._listener = DoorbellListener(self._own_doorbell, lambda notices: self._react(from_engine(notices)))
        self._listener.start()
        if self._postgres_conninfo is not None:
            self._postgres = PostgresNotify(
                self._postgres_conninfo,
                self._process_id,
                lambda notices: self._react(from_peers(PeerNotices.of(notices))),
            )

    async def run(self) -> None:
        """Send notices to the other API processes and receive theirs until cancelled. On SQLite this returns at
        once."""
        if self._postgres is not None:
            self.peers.send = self._postgres.send
            await self._postgres.run()

    def _react(self, reaction: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(reaction)
        self._reactions.add(task)
        task.add_done_callback(self._reactions.discard)

    async def close(self) -> None:
        """Stop receiving and sending, and cancel the tasks that still run. Cancel `run` before."""
        if self._listener is not None:
            self._listener.close()
        reactions = list(self._reactions)
        for task in reactions:
            task.cancel()
        await asyncio.gather(*reactions, return_exceptions=True)
        self.engine.close()
