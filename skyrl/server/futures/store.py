"""The public face of this package. It joins four parts: `recording` (a request comes in), `waiting` (its client asks
for the outcome), `settling` (the request ends), and `stored_ends` (a client asks for all its samples at once).
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from skyrl.base.types.requests import Kind, NewRequest, RequestKey
from skyrl.server.futures.entries import Entries
from skyrl.server.futures.recording import Recording
from skyrl.server.futures.settling import Settling
from skyrl.server.futures.stored_ends import StoredEnds
from skyrl.server.futures.waiting import Waiting
from skyrl.storage.db.database import Change, Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.notices import PeerNotifier

SAFETY_POLL_S = 1.0
"""How often the outcomes of requests that other processes settle are looked up, in case a notice was lost. There are no
look-ups while no such request is pending."""


class FutureStore:
    """All requests of one API process. `owner` is the name of the process: it owns the samples that it forwards.
    `peers` tells the other API processes of the database which requests have ended here. `recorder` writes the rows of
    new forwarded samples; `writer` does without it.

    `record`, `wait` and `settle` return the coroutine of their part: every sample passes through them, and a coroutine
    around a coroutine would cost it time."""

    def __init__(
        self,
        database: Database,
        writer: GroupCommitWriter,
        owner: str | None = None,
        peers: PeerNotifier | None = None,
        recorder: GroupCommitWriter | None = None,
    ) -> None:
        peers = peers or PeerNotifier()
        self._entries = Entries()
        self._recording = Recording(database, writer, recorder or writer, self._entries, owner)
        self._waiting = Waiting(database, self._entries)
        self.ends = StoredEnds(database, self._waiting.follow, lambda: peers.alone)
        """Answers the long polls for all samples of a client."""
        self._settling = Settling(database, writer, self._entries, self.ends, peers)

    # A request comes in.

    def record(self, request: NewRequest, first: Change | None = None) -> Coroutine[Any, Any, tuple[str, bool]]:
        """Store a request durably. Returns its id, and whether the caller must start it. A repeat returns the id of the
        first request, which was started before. `first` runs in the transaction that stores the request's row, before
        the row is written: both changes are stored, or neither.

        Raises RequestError when the key was used before with another body, and what `first` raises.
        """
        return self._recording.record(request, first)

    # Its client waits for it.

    def wait(self, request_id: str, tenant: str, timeout_s: float) -> Coroutine[Any, Any, Outcome | None]:
        """The stored outcome, or None when there is none after `timeout_s`.

        Raises KeyError when no such request is stored, or when it belongs to another tenant.
        """
        return self._waiting.wait(request_id, tenant, timeout_s)

    async def kind_of(self, request_id: str, tenant: str) -> Kind:
        """Raises KeyError when no such request is stored, or when it belongs to another tenant."""
        return await self._waiting.kind_of(request_id, tenant)

    def is_pending(self, request_id: str) -> bool:
        """Whether the request is in memory and has not ended."""
        return self._entries.is_pending(request_id)

    @property
    def pending(self) -> int:
        return self._entries.pending

    # The request ends.

    def settle(self, request_id: str, outcome: Outcome) -> Coroutine[Any, Any, None]:
        """End a forwarded sample: store its outcome, then tell those who wait. Returns when the outcome is durable."""
        return self._settling.settle(request_id, outcome)

    async def end(self, request_id: str, outcome: Outcome) -> bool:
        """End a pending request with an outcome that nobody had to compute, for example of a cancelled request. Returns
        False if the request had ended before: the first outcome stays."""
        return await self._settling.end(request_id, outcome)

    async def read_outcomes(self, request_ids: Iterable[str]) -> list[str]:
        """Read outcomes that another process has stored, and tell those who wait for them. Returns the ids of those
        requests that this process was forwarding."""
        return await self._settling.read_outcomes(request_ids)

    async def poll_outcomes(self) -> None:
        """Look up the outcomes of all pending requests that other processes settle."""
        await self._settling.poll_outcomes()

    # Which process settles the request.

    def adopt(
        self, request_id: str, kind: Kind, tenant: str, session_id: str, digest: bytes, key: RequestKey | None
    ) -> bool:
        """Remember a pending request that was found in the database. This process settles it if it is a sample to
        forward. Returns False if this process settles it already."""
        return self._recording.adopt(request_id, kind, tenant, session_id, digest, key)

    def leave(self, request_ids: Iterable[str]) -> list[str]:
        """Hand over samples to another process: those that this process forwards and that have not ended. Local waiters
        keep waiting. Returns the ids of the samples that were handed over."""
        return self._entries.hand_over(request_ids)

    def forwards(self, request_id: str) -> bool:
        """Whether the request is in memory and this process settles it."""
        return self._entries.is_own(request_id)

    def forwarded(self) -> list[str]:
        """Ids of the recorded, pending requests that this process settles."""
        return self._entries.own_pending()

    # Its session, or the process, ends.

    def drop_session(self, session_id: str) -> list[str]:
        """Forget a closed session's pending requests in memory. Those who wait for them get KeyError or TargetGone.
        Returns the ids of the requests."""
        self.ends.drop_session(session_id)
        return self._entries.drop_session(session_id)

    async def fail_session(self, session_id: str) -> None:
        """Fail a closed session's pending samples in the database. For a server without an engine; the engine does it
        otherwise."""
        await self._settling.fail_session(session_id)

    def release_waiters(self) -> None:
        """Answer at once all that wait, and all that come, that there is no outcome yet: the process is about to
        end."""
        self._waiting.release()
        self.ends.release()
