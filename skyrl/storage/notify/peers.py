"""Notices between the API processes of a database. They are ids; `skyrl.storage.notify.postgres` carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

AGENT = "agent-"
APART_S = 0.02
"""The least time between two sends. Every send wakes every other process, and costs it as much as many ids do. A
process reads new ends no more often either (`stored_ends.READ_EVERY_S`)."""


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
