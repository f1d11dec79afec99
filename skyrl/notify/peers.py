"""The other API processes of the database, as this one knows them: what it tells them, and what they tell.

Knows the words, which are ids. Does not know how they travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class PeerWords:
    """What another API process tells: ids of `requests` that have ended, of `sampling_sessions` that these belong to,
    and of `sessions` that have ended or changed."""

    requests: list[str] = field(default_factory=list)
    sampling_sessions: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, words: Iterable[str]) -> PeerWords:
        """An id shows what it is of: that of a sampling session has a colon, and that of a session begins with s."""
        told = cls()
        for word in words:
            if ":" in word:
                told.sampling_sessions.append(word)
            elif word.startswith("s"):
                told.sessions.append(word)
            else:
                told.requests.append(word)
        return told


class PeerNotifier:
    """Tells the other API processes. `living` are the ids of those that live; while there is none, nothing is told.
    The words of one turn of the event loop go to `send` together."""

    def __init__(self) -> None:
        self.living: frozenset[str] = frozenset()
        self.send: Callable[[list[str]], None] | None = None
        self._turn: dict[str, None] = {}

    @property
    def alone(self) -> bool:
        return not self.living

    def request_ended(self, request_id: str, sampling_session_id: str | None = None) -> None:
        """A request has ended here. `sampling_session_id` is given for a sample."""
        self._tell((request_id,) if sampling_session_id is None else (request_id, sampling_session_id))

    def session_changed(self, session_id: str) -> None:
        """A session has ended or changed here."""
        self._tell((session_id,))

    def _tell(self, words: Iterable[str]) -> None:
        if self.alone or self.send is None:
            return
        if not self._turn:
            asyncio.get_running_loop().call_soon(self._send_turn)
        self._turn.update(dict.fromkeys(words))

    def _send_turn(self) -> None:
        words, self._turn = list(self._turn), {}
        if self.send is not None and words:
            self.send(words)
