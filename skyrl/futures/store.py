"""The requests of one API process: recorded once, waited for, settled.

This is the public face, and joins four parts that share the entries in memory. Each part reads from top to bottom:
`recording` (a request comes in), `settling` (it ends), `waiting` (its client asks for it), `stored_ends` (a client asks
for all its samples at once). None knows what a request asks for, nor who computes its result.
"""

from __future__ import annotations

from collections.abc import Iterable

from skyrl.db.database import Change, Database
from skyrl.db.futures import Outcome
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.entries import Entries
from skyrl.futures.recording import Recording
from skyrl.futures.settling import Settling
from skyrl.futures.stored_ends import StoredEnds
from skyrl.futures.waiting import Waiting
from skyrl.notify.peers import PeerNotifier
from skyrl.types.kinds import Kind
from skyrl.types.requests import NewRequest, RequestKey

SAFETY_POLL_S = 1.0
"""How often pending requests of other processes are looked up, in case a word was lost; never while none is pending."""


class FutureStore:
    """All requests of one API process, which is the `owner` of the samples that it forwards. The other API processes of
    the database, its `peers`, are told what ends here."""

    def __init__(
        self,
        database: Database,
        writer: GroupCommitWriter,
        owner: str | None = None,
        peers: PeerNotifier | None = None,
    ) -> None:
        peers = peers or PeerNotifier()
        self._entries = Entries()
        self._recording = Recording(database, writer, self._entries, owner)
        self._waiting = Waiting(database, self._entries)
        self.ends = StoredEnds(database, self._waiting.wait_for, lambda: peers.alone)
        """Answers the long polls for all samples of a client."""
        self._settling = Settling(database, writer, self._entries, self.ends, peers)

    # A request comes in.

    async def record(self, request: NewRequest, first: Change | None = None) -> tuple[str, bool]:
        """Store a request durably. Returns its id, and whether the caller is to start it: a repeat returns the id of
        the first one, which was started then. `first` runs in the transaction that stores the request, before the
        request's row: both are stored, or neither.

        Raises RequestError when the key was used before with another body, and whatever `first` raises.
        """
        return await self._recording.record(request, first)

    # Its client waits for it.

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """The outcome, which is stored by then, or None when there is none after `timeout_s`.

        Raises KeyError when no such request is stored, or it is another tenant's.
        """
        return await self._waiting.wait(request_id, tenant, timeout_s)

    async def kind_of(self, request_id: str, tenant: str) -> Kind:
        """Raises KeyError when no such request is stored, or it is another tenant's."""
        return await self._waiting.kind_of(request_id, tenant)

    def is_pending(self, request_id: str) -> bool:
        """Whether the request is in memory and has not ended."""
        return self._entries.is_pending(request_id)

    @property
    def pending(self) -> int:
        return self._entries.pending

    # It ends.

    async def settle(self, request_id: str, outcome: Outcome) -> None:
        """End a forwarded sample: store its outcome, then tell all who wait; returns when the row is durable."""
        await self._settling.settle(request_id, outcome)

    async def end(self, request_id: str, outcome: Outcome) -> bool:
        """Settle a pending request without its result: nobody is to compute it any more. False if it had ended: the
        first outcome stays."""
        return await self._settling.end(request_id, outcome)

    async def read_outcomes(self, request_ids: Iterable[str]) -> list[str]:
        """Read outcomes that another process has stored, and tell whoever waits for them. Returns the ids of those
        requests that this process was forwarding."""
        return await self._settling.read_outcomes(request_ids)

    async def poll_outcomes(self) -> None:
        """Look for outcomes of all requests that other processes settle."""
        await self._settling.poll_outcomes()

    # Which process settles it.

    def adopt(
        self, request_id: str, kind: Kind, tenant: str, session_id: str, digest: bytes, key: RequestKey | None
    ) -> bool:
        """Take over a pending request found in the database. False if it is this process's own already."""
        return self._recording.adopt(request_id, kind, tenant, session_id, digest, key)

    def leave(self, request_ids: Iterable[str]) -> list[str]:
        """Hand over to another process those of these samples that this process forwards and that have not ended. Local
        waiters keep waiting. Returns the ids."""
        return self._entries.hand_over(request_ids)

    def forwards(self, request_id: str) -> bool:
        """Whether the request is in memory and this process settles it."""
        return self._entries.is_own(request_id)

    def forwarded(self) -> list[str]:
        """Ids of pending requests that this process settles."""
        return self._entries.own()

    # Its session, or the process, ends.

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests in memory; waiters are told that they are gone. Returns their
        ids."""
        self.ends.drop_session(session_id)
        return self._entries.drop_session(session_id)

    async def fail_session(self, session_id: str) -> None:
        """Settle a closed session's pending samples in the database. Where there is an engine, the engine does so."""
        await self._settling.fail_session(session_id)

    def release_waiters(self) -> None:
        """The process is about to end: those who wait are told now that there is no outcome yet, as are those who
        come."""
        self._waiting.release()
        self.ends.release()
